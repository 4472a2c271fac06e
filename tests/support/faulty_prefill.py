"""`python -m tests.support.faulty_prefill BLOCK_INDEX DELAY_S …`: a prefill worker that sends that block late."""

from __future__ import annotations

import sys
from functools import partial

from kvferry.worker_process import main
from kvtransfer.faults import Fault, FaultKind, Faults
from prefill_svc.role import PrefillRole

if __name__ == "__main__":
    fault = Fault(FaultKind.DELAY, block_index=int(sys.argv.pop(1)), delay_s=float(sys.argv.pop(1)))
    main("prefill", partial(PrefillRole, faults=Faults((fault,))))
