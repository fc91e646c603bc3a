"""Registry: which workers exist. `base` is the contract, `direct` the embedded default, `memory` the fake."""
