"""The command `kvferry`. `app.py` puts the commands together; each of the other modules holds a few of them."""
