"""Object stores: the one way from a path of a spec to a local path, or to an object in a store, through fsspec."""
