"""Control plane: router, conversations, placement, schedulers, ring leaders. It decides what; workers know how."""
