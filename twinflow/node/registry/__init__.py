"""Registry: which workers exist. `base` is the contract, `factory` chooses: `direct`, the embedded default, or `redis`
(`entries` is its pure part); `memory` is the fake."""
