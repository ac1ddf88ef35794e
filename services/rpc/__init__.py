"""gRPC between processes: servicers, peers, the error table, and the wire format."""
