"""Twinflow: prefill/decode-disaggregated serving of hybrid language models. The library; it knows no service."""

__version__ = "0.1.0"
