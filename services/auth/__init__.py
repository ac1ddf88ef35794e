"""Who may do what: bearer tokens name tenants, and a tenant sees its own conversations only."""
