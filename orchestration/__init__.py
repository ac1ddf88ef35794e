"""The control plane: router, conversations, placement, schedulers, group leaders. Decides what; workers know how."""
