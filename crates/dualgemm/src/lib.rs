//! Fused NVFP4 gated-MLP kernels: plan, prepack, run.
