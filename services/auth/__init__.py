"""Authentication: tokens and certificates name tenants, and a tenant sees its own conversations only."""
