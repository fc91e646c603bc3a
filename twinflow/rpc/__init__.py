"""gRPC: generated stubs (`v1`), conversions to contracts, channels."""
