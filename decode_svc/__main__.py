"""`python -m decode_svc`: one decode worker."""

from decode_svc.role import DecodeRole
from kvferry.worker_process import main

if __name__ == "__main__":
    main("decode", DecodeRole)
