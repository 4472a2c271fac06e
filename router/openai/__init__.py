"""OpenAI's HTTP interface: the second shell around `router/serving.py`.

HTTP request ─► Endpoint (key, counting, span, errors) ─► fields → GenerateRequest ─► Serving ─► JSON or events
"""
