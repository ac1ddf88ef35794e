"""Conversations: store, prompts, forks, quotas, and rebalancing of retained KV."""
