//! Devices, streams, buffers, tensor views and kernel launches for AMD Instinct GPUs and their emulator.
