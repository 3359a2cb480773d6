//! A call with its tensors on a device.

use super::{Call, Described as _, DynTensor, HostCall, Named, Operator, POISON, Role, TensorSpec};
use crate::{Element, Error, Result, Stream, TensorView, TensorViewMut};
use std::any::Any;

/// A call with its tensors on a device, as [`Operator::run`] takes it.
#[derive(Debug)]
pub struct DeviceCall {
    inputs: Call<DynTensor>,
    outputs: Named<DynTensor>,
    workspace: Option<DynTensor>,
    kept: Option<Box<dyn Any + Send + Sync>>,
}

impl DeviceCall {
    /// Copies the inputs to the device and allocates the outputs, poisoned ([`DynTensor::poisoned`]).
    ///
    /// # Errors
    /// What `check_complete` and the operator's `outputs` find wrong; as [`Stream::upload`].
    pub fn prepare(stream: &Stream, call: &HostCall) -> Result<Self> {
        Self::prepare_filled(stream, call, POISON)
    }

    /// As [`prepare`](Self::prepare); the bytes of the outputs are all `fill`.
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare).
    pub fn prepare_filled(stream: &Stream, call: &HostCall, fill: u8) -> Result<Self> {
        call.check_complete()?;
        let mut new = (call.op.outputs)(&call.spec())?;
        let mut inputs: Call<DynTensor> = Call {
            op: call.op,
            tensors: Vec::new(),
            scalars: call.scalars.clone(),
            wanted: call.wanted.clone(),
            reference_limit: call.reference_limit,
        };
        let mut outputs = Vec::new();
        for arg in call.op.args {
            let given = call.optional(arg.name).map(|t| DynTensor::upload(stream, t)).transpose();
            let given = given.map_err(|e| e.of_argument(call.op.name, arg.name))?;
            match (arg.role, given) {
                (Role::In, Some(tensor)) => inputs.tensors.push((arg.name, tensor)),
                (Role::InOut(_), Some(tensor)) => outputs.push((arg.name, tensor)),
                (Role::Out(_), _) => {
                    if let Some(i) = new.iter().position(|(n, _)| *n == arg.name) {
                        let (name, spec) = new.swap_remove(i);
                        let tensor = DynTensor::filled(stream, spec, fill);
                        outputs.push((name, tensor.map_err(|e| e.of_argument(call.op.name, name))?));
                    }
                }
                (_, None) => {}
            }
        }
        Ok(Self { inputs, outputs, workspace: None, kept: None })
    }

    /// The inputs with the scalars, and the outputs to be taken one by one.
    pub fn split(&mut self) -> (Inputs<'_>, Outputs<'_>) {
        let op = self.inputs.op.name;
        let tensors = self.outputs.iter_mut().map(|(n, t)| (*n, t)).collect();
        let outputs =
            Outputs { op, tensors, workspace: Some(&mut self.workspace), kept: Some(&mut self.kept) };
        (Inputs(&self.inputs), outputs)
    }

    /// The operator.
    pub fn operator(&self) -> &'static Operator {
        self.inputs.op
    }

    /// The outputs, those updated in place included, in the order of the arguments.
    pub fn outputs(&self) -> impl Iterator<Item = (&'static str, &DynTensor)> {
        self.outputs.iter().map(|(n, t)| (*n, t))
    }
}

/// The inputs of a [`DeviceCall`]; everything else is that of the [`Call`] behind it.
#[derive(Debug, Clone, Copy)]
pub struct Inputs<'a>(&'a Call<DynTensor>);

impl<'a> Inputs<'a> {
    /// An input with its static type.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is missing, [`Error::DType`] for another type than `T`.
    pub fn view<T: Element>(&self, name: &'static str) -> Result<TensorView<'a, T>> {
        self.0.get(name)?.view(self.0.op.name, name)
    }

    /// An input that may be missing.
    ///
    /// # Errors
    /// [`Error::DType`] for another type than `T`.
    pub fn optional_view<T: Element>(&self, name: &'static str) -> Result<Option<TensorView<'a, T>>> {
        self.0.optional(name).map(|t| t.view(self.0.op.name, name)).transpose()
    }
}

impl std::ops::Deref for Inputs<'_> {
    type Target = Call<DynTensor>;

    fn deref(&self) -> &Self::Target {
        self.0
    }
}

/// The outputs of a [`DeviceCall`], each to be taken once.
#[derive(Debug)]
pub struct Outputs<'a> {
    op: &'static str,
    tensors: Named<&'a mut DynTensor>,
    workspace: Option<&'a mut Option<DynTensor>>,
    kept: Option<&'a mut Option<Box<dyn Any + Send + Sync>>>,
}

impl<'a> Outputs<'a> {
    /// An output with its static type.
    ///
    /// # Errors
    /// [`Error::Argument`] if there is none or it is taken, [`Error::DType`] for another type than `T`.
    pub fn take<T: Element>(&mut self, name: &'static str) -> Result<TensorViewMut<'a, T>> {
        let op = self.op;
        let missing = || Error::argument(op, name, "no tensor", "an output, taken once");
        self.take_optional(name)?.ok_or_else(missing)
    }

    /// An output that the call may not ask for.
    ///
    /// # Errors
    /// [`Error::DType`] for another type than `T`.
    pub fn take_optional<T: Element>(&mut self, name: &'static str) -> Result<Option<TensorViewMut<'a, T>>> {
        let Some(i) = self.tensors.iter().position(|(n, _)| *n == name) else { return Ok(None) };
        self.tensors.swap_remove(i).1.view_mut(self.op, name).map(Some)
    }

    /// A workspace of `len` elements, to be taken once a run: allocated by the first run of a call, kept for the others.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is taken; as [`Stream::alloc_zeroed`].
    pub fn workspace<T: Element>(&mut self, stream: &Stream, len: usize) -> Result<TensorViewMut<'a, T>> {
        let taken = || Error::argument(self.op, "workspace", "taken before", "taken once a run");
        let slot = self.workspace.take().ok_or_else(taken)?;
        let spec = TensorSpec::new(T::DTYPE, [len]);
        if slot.as_ref().is_none_or(|t| t.spec() != spec) {
            let tensor = DynTensor::poisoned(stream, spec);
            *slot = Some(tensor.map_err(|e| e.of_argument(self.op, "workspace"))?);
        }
        slot.as_mut().ok_or_else(taken)?.view_mut(self.op, "workspace")
    }

    /// State beside the workspace, to be taken once a run: made by the first run of a call, kept for the others.
    ///
    /// # Errors
    /// [`Error::Argument`] if it is taken; those of `make`.
    pub fn kept<T: Any + Send + Sync>(&mut self, make: impl FnOnce() -> Result<T>) -> Result<&'a mut T> {
        let op = self.op;
        let taken = || Error::argument(op, "state", "taken before", "taken once a run");
        let slot = self.kept.take().ok_or_else(taken)?;
        if slot.as_ref().is_none_or(|state| !state.is::<T>()) {
            *slot = Some(Box::new(make()?));
        }
        slot.as_mut().and_then(|state| state.downcast_mut()).ok_or_else(taken)
    }
}
