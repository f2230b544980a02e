//! What a GPU, real or simulated, must offer a host program.
