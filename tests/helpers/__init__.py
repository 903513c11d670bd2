"""What tests share: plain references, small networks, worker processes."""
