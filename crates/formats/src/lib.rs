//! NVFP4 and MXFP4 as bytes: scalars, blocks, scale layouts, tensors and every producer's quantizer.
