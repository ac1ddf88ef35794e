"""Between the control plane's dataclasses and the contract's messages: pure functions, one pair a type."""
