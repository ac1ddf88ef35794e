"""Ring algorithms: pass-KV and pass-Q prefill, and the decode variants. A new algorithm is one file here."""
