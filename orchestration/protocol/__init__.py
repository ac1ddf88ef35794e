"""Messages, ports, settings and hand-off states of the control plane. Imports no sibling room."""
