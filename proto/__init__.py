"""Generated protobuf stubs; run `make protos` after a change of a .proto file."""
