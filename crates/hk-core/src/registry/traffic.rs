//! Bytes that an operator has to move.

use super::{HostCall, TensorSpec};

/// Bytes that an operator has to move at least: each input read once, each output written once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Traffic {
    /// Bytes read.
    pub read: u64,
    /// Bytes written.
    pub written: u64,
}

impl Traffic {
    /// Every tensor of the call once: those that it is given are read, those that it makes or updates are written.
    pub fn once(call: &HostCall) -> Self {
        let bytes = |spec: &TensorSpec| spec.bytes().unwrap_or(0) as u64;
        let updated =
            call.tensors().filter(|(n, _)| call.op.arg(n).is_some_and(|a| a.role.output().is_some()));
        let made = (call.op.outputs)(&call.spec()).unwrap_or_default();
        Self {
            read: call.tensors().map(|(_, t)| t.bytes().len() as u64).sum(),
            written: updated.map(|(_, t)| t.bytes().len() as u64).sum::<u64>()
                + made.iter().map(|(_, spec)| bytes(spec)).sum::<u64>(),
        }
    }
}
