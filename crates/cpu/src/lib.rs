//! The fused dual GEMM on CPUs: prepacked weights, AVX-512/VNNI, AVX2 and portable kernels.
