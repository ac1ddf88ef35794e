"""The control plane: router, conversations, placement, schedulers, ring leaders. Decides what; workers know how."""
