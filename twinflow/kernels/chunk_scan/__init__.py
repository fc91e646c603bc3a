"""The sequential half of chunked linear attention, shared by the gated delta rule and Mamba-2."""
