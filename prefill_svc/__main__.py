"""`python -m prefill_svc`: one prefill worker."""

from kvferry.worker_process import main
from prefill_svc.role import PrefillRole

if __name__ == "__main__":
    main("prefill", PrefillRole)
