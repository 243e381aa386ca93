//! Client side of the shared stack: find or start the supervisor, hold a lease.
