"""Decode loop of a ring's ranks: mailbox, messages between ranks, the batch and its steps."""
