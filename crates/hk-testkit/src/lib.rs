//! Test support: tolerances, poison and guards, device matrix, proptest strategies.
