"""Choice between pass-KV and pass-Q measured on links of known rate, in network namespaces."""
