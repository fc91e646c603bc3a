"""Admin: the gRPC admin API of the whole cluster. The router asks its workers and puts their answers together."""
