//! Normalisation kernels (RMSNorm family) for AMD Instinct GPUs.
