//! Tables of invalid calls: the error that an operator returns for each, and that it then writes nothing.

use crate::{Gpu, Place, Tensor, devices};
use hk_core::{
    DType, E8M0, Element, Error, Fp4x2, Fp8E4M3, Fp8E4M3Fnuz, Fp8E5M2, Layout, Result, Stream, TensorView,
    TensorViewMut, bf16, f16,
};

/// The errors of an operator: a valid call, and invalid calls made from it by one change each.
///
/// ```no_run
/// use hk_core::{Result, Stream, TensorView, TensorViewMut, bf16};
/// use hk_testkit::{Refusals, kind};
/// # fn norm(_: &Stream, _: TensorView<bf16>, _: TensorViewMut<bf16>, _: f32) -> Result<()> { Ok(()) }
/// Refusals::new(1e-6, |stream, tensors, eps| {
///     norm(stream, tensors.input::<bf16>("x"), tensors.output::<bf16>("y"), eps)
/// })
/// .input::<bf16>("x", [3, 4])
/// .output::<bf16>("y", [3, 4])
/// .accepts(|_| {})
/// .refuses(kind!(Shape), &["norm: y: shape [2, 4]"], |call| call.shape("y", [2, 4]))
/// .refuses(kind!(Argument), &["eps"], |call| call.options = -1.0)
/// .refuses(kind!(Overlap), &["x and y"], |call| call.overlap("x", "y", 2))
/// .refuses_other_devices();
/// ```
///
/// Calls run on the first device. After an error every output is unchanged.
pub struct Refusals<'f, O> {
    call: Call<O>,
    run: Box<Run<'f, O>>,
}

type Run<'f, O> = dyn Fn(&Stream, &mut Tensors, O) -> Result<()> + 'f;

/// A call: tensors by name, and options.
#[derive(Debug, Clone)]
pub struct Call<O> {
    slots: Vec<Slot>,
    overlap: Option<Overlap>,
    /// The arguments that are not tensors.
    pub options: O,
}

#[derive(Debug, Clone)]
struct Slot {
    name: &'static str,
    dtype: DType,
    place: Place,
    output: bool,
    left_out: bool,
    elsewhere: bool,
    broadcast: Option<Vec<usize>>,
}

#[derive(Debug, Clone, Copy)]
struct Overlap {
    input: &'static str,
    output: &'static str,
    offset: usize,
}

/// The tensors of a running call.
pub struct Tensors<'a> {
    inputs: Vec<(&'static str, AnyView<'a>)>,
    outputs: Vec<(&'static str, AnyViewMut<'a>)>,
}

/// Types that tensors of a [`Call`] can have.
pub trait CallElement: Element {
    #[doc(hidden)]
    fn from_view(view: AnyView<'_>) -> Option<TensorView<'_, Self>>;
    #[doc(hidden)]
    fn from_view_mut(view: AnyViewMut<'_>) -> Option<TensorViewMut<'_, Self>>;
}

/// A flat view with the shape of a contiguous tensor.
macro_rules! shaped {
    ($view:expr, $shape:expr) => {{
        let (mut view, shape): (_, &[usize]) = ($view, $shape);
        for axis in 0..shape.len() - 1 {
            let inner = shape[axis + 1..].iter().product();
            view = view.split_axis(axis, inner).unwrap_or_else(|e| panic!("{e}"));
        }
        view
    }};
}

macro_rules! any {
    ($($variant:ident: $t:ty),+ $(,)?) => {
        enum AnyTensor { $($variant(Tensor<$t>)),+ }

        #[doc(hidden)]
        #[derive(Debug, Clone, Copy)]
        pub enum AnyView<'a> { $($variant(TensorView<'a, $t>)),+ }

        #[doc(hidden)]
        #[derive(Debug)]
        pub enum AnyViewMut<'a> { $($variant(TensorViewMut<'a, $t>)),+ }

        $(impl CallElement for $t {
            fn from_view(view: AnyView<'_>) -> Option<TensorView<'_, Self>> {
                if let AnyView::$variant(view) = view { Some(view) } else { None }
            }

            fn from_view_mut(view: AnyViewMut<'_>) -> Option<TensorViewMut<'_, Self>> {
                if let AnyViewMut::$variant(view) = view { Some(view) } else { None }
            }
        })+

        impl AnyTensor {
            fn new(gpu: &Gpu, slot: &Slot) -> Self {
                match slot.dtype {
                    $(<$t as Element>::DTYPE => Self::$variant(place(gpu, slot)),)+
                    other => panic!("{}: no table has tensors of {other}", slot.name),
                }
            }

            fn view(&self, slot: &Slot) -> AnyView<'_> {
                match self {
                    $(Self::$variant(tensor) => AnyView::$variant(match &slot.broadcast {
                        Some(shape) => tensor.view().broadcast(shape).unwrap_or_else(|e| panic!("{e}")),
                        None => tensor.view(),
                    }),)+
                }
            }

            fn view_mut(&mut self) -> AnyViewMut<'_> {
                match self {
                    $(Self::$variant(tensor) => AnyViewMut::$variant(tensor.view_mut()),)+
                }
            }

            /// A view of `input`, and `self` as an output that begins `offset` elements behind the first of the input.
            fn share(&mut self, input: &Slot, output: &Slot, offset: usize) -> (AnyView<'_>, AnyViewMut<'_>) {
                match self {
                    $(Self::$variant(tensor) => {
                        let all = tensor.view_mut();
                        let (from, to) = (input.place.layout(), output.place.layout());
                        let x = all.alias().slice(0, 0..from.numel()).unwrap_or_else(|e| panic!("{e}"));
                        let y = all.slice(0, offset..offset + to.numel()).unwrap_or_else(|e| panic!("{e}"));
                        let x = shaped!(x, from.shape());
                        (AnyView::$variant(x), AnyViewMut::$variant(shaped!(y, to.shape())))
                    })+
                }
            }

            fn assert_untouched(&self, gpu: &Gpu) {
                match self {
                    $(Self::$variant(tensor) => gpu.assert_untouched(tensor),)+
                }
            }
        }
    };
}

any! {
    F32: f32, F16: f16, Bf16: bf16, I8: i8, I32: i32, I64: i64, U8: u8, Fp8E4M3: Fp8E4M3, Fp8E4M3Fnuz: Fp8E4M3Fnuz,
    Fp8E5M2: Fp8E5M2, Fp4x2: Fp4x2, E8M0: E8M0,
}

fn place<T: Element>(gpu: &Gpu, slot: &Slot) -> Tensor<T> {
    if slot.output {
        gpu.poisoned(&slot.place)
    } else {
        gpu.upload(&vec![T::zeroed(); slot.place.layout().numel()], &slot.place)
    }
}

impl<'a> Tensors<'a> {
    /// The input `name`.
    ///
    /// # Panics
    /// If there is none of this type.
    #[track_caller]
    pub fn input<T: CallElement>(&self, name: &str) -> TensorView<'a, T> {
        self.optional_input(name).unwrap_or_else(|| panic!("the call has no input `{name}`"))
    }

    /// The input `name`, if the call has it.
    ///
    /// # Panics
    /// If it has another type.
    #[track_caller]
    pub fn optional_input<T: CallElement>(&self, name: &str) -> Option<TensorView<'a, T>> {
        let (_, view) = self.inputs.iter().find(|(n, _)| *n == name)?;
        Some(T::from_view(*view).unwrap_or_else(|| panic!("`{name}` is not of {}", T::DTYPE)))
    }

    /// The output `name`.
    ///
    /// # Panics
    /// If there is none of this type, or it was taken before.
    #[track_caller]
    pub fn output<T: CallElement>(&mut self, name: &str) -> TensorViewMut<'a, T> {
        self.optional_output(name).unwrap_or_else(|| panic!("the call has no output `{name}`"))
    }

    /// The output `name`, if the call has it.
    ///
    /// # Panics
    /// If it has another type.
    #[track_caller]
    pub fn optional_output<T: CallElement>(&mut self, name: &str) -> Option<TensorViewMut<'a, T>> {
        let at = self.outputs.iter().position(|(n, _)| *n == name)?;
        let (_, view) = self.outputs.swap_remove(at);
        Some(T::from_view_mut(view).unwrap_or_else(|| panic!("`{name}` is not of {}", T::DTYPE)))
    }
}

impl<O> Call<O> {
    #[track_caller]
    fn slot(&mut self, name: &str) -> &mut Slot {
        self.slots.iter_mut().find(|s| s.name == name).unwrap_or_else(|| panic!("no tensor `{name}`"))
    }

    /// Gives a tensor another shape, contiguous.
    #[track_caller]
    pub fn shape<const N: usize>(&mut self, name: &str, shape: [usize; N]) {
        self.slot(name).place = shape.into();
    }

    /// Gives a tensor another layout or alignment.
    #[track_caller]
    pub fn place(&mut self, name: &str, place: impl Into<Place>) {
        self.slot(name).place = place.into();
    }

    /// Gives a tensor other strides.
    #[track_caller]
    pub fn strides<const N: usize>(&mut self, name: &str, strides: [usize; N]) {
        let slot = self.slot(name);
        let layout = Layout::with_strides(slot.place.layout().shape(), strides);
        slot.place = Place::new(layout.unwrap_or_else(|e| panic!("{e}")));
    }

    /// Gives a tensor of one element this shape, with strides of 0.
    #[track_caller]
    pub fn broadcast<const N: usize>(&mut self, name: &str, shape: [usize; N]) {
        let slot = self.slot(name);
        slot.place = [1; N].into();
        slot.broadcast = Some(shape.to_vec());
    }

    /// Gives a tensor another type.
    #[track_caller]
    pub fn dtype(&mut self, name: &str, dtype: DType) {
        self.slot(name).dtype = dtype;
    }

    /// Leaves an optional tensor out.
    #[track_caller]
    pub fn without(&mut self, name: &str) {
        self.slot(name).left_out = true;
    }

    /// Puts a tensor on another device than the stream's.
    #[track_caller]
    pub fn elsewhere(&mut self, name: &str) {
        self.slot(name).elsewhere = true;
    }

    /// Lets an output begin `offset` elements behind the first element of an input of its type.
    pub fn overlap(&mut self, input: &'static str, output: &'static str, offset: usize) {
        self.overlap = Some(Overlap { input, output, offset });
    }
}

impl<'f, O: Clone> Refusals<'f, O> {
    /// `run` calls the operator with tensors by name. `options` are those of the valid call.
    pub fn new(options: O, run: impl Fn(&Stream, &mut Tensors, O) -> Result<()> + 'f) -> Self {
        Self { call: Call { slots: vec![], overlap: None, options }, run: Box::new(run) }
    }

    fn slot<T: CallElement>(mut self, name: &'static str, place: impl Into<Place>, output: bool) -> Self {
        let slot = Slot {
            name,
            dtype: T::DTYPE,
            place: place.into(),
            output,
            left_out: false,
            elsewhere: false,
            broadcast: None,
        };
        self.call.slots.push(slot);
        self
    }

    /// Adds an input of zeros to the valid call.
    #[must_use]
    pub fn input<T: CallElement>(self, name: &'static str, place: impl Into<Place>) -> Self {
        self.slot::<T>(name, place, false)
    }

    /// Adds an output to the valid call.
    #[must_use]
    pub fn output<T: CallElement>(self, name: &'static str, place: impl Into<Place>) -> Self {
        self.slot::<T>(name, place, true)
    }

    /// Asserts that the call is accepted after `change`.
    ///
    /// # Panics
    /// If it is refused.
    #[track_caller]
    pub fn accepts(self, change: impl FnOnce(&mut Call<O>)) -> Self {
        self.attempt(change).result.unwrap_or_else(|e| panic!("this is to be accepted: {e}"));
        self
    }

    /// Asserts that the call after `change` is refused with an error of this kind whose message says each of `parts`, and
    /// that no output is written.
    ///
    /// # Panics
    /// If it is accepted, refused otherwise, or an output is written.
    #[track_caller]
    pub fn refuses(
        self,
        kind: fn(&Error) -> bool,
        parts: &[&str],
        change: impl FnOnce(&mut Call<O>),
    ) -> Self {
        self.attempt(change).assert_refused(kind, parts);
        self
    }

    /// Asserts that each tensor is refused by its name if it lies on another device than the stream.
    ///
    /// # Panics
    /// If one is not.
    #[track_caller]
    pub fn refuses_other_devices(mut self) -> Self {
        for name in self.call.slots.iter().map(|s| s.name).collect::<Vec<_>>() {
            self = self.refuses(crate::kind!(DeviceMismatch), &[name], |call| call.elsewhere(name));
        }
        self
    }

    /// Asserts that each output is refused on each input of its type that begins one element before it.
    ///
    /// # Panics
    /// If one is not, or if the error does not name both.
    #[track_caller]
    pub fn refuses_overlaps(mut self) -> Self {
        let slots = self.call.slots.clone();
        for output in slots.iter().filter(|s| s.output) {
            for input in slots.iter().filter(|s| !s.output && s.dtype == output.dtype) {
                // An output behind a single element would lie beside it.
                let offset = usize::from(input.place.layout().numel() > 1);
                let names = format!("{} and {}", input.name, output.name);
                self = self.refuses(crate::kind!(Overlap), &[&names], |call| {
                    call.overlap(input.name, output.name, offset);
                });
            }
        }
        self
    }

    #[track_caller]
    fn attempt(&self, change: impl FnOnce(&mut Call<O>)) -> Attempt {
        let mut call = self.call.clone();
        change(&mut call);
        let mut options = Some(call.options);
        attempt(&call.slots, call.overlap, &mut |stream, tensors| {
            (self.run)(stream, tensors, options.take().expect("one call"))
        })
    }
}

/// What came of a call: its result, and its tensors with their devices.
struct Attempt {
    result: Result<()>,
    gpus: Vec<Gpu>,
    tensors: Vec<(Slot, AnyTensor)>,
}

impl Attempt {
    #[track_caller]
    fn assert_refused(self, kind: fn(&Error) -> bool, parts: &[&str]) {
        crate::assert_error(self.result, kind, parts);
        for (slot, tensor) in &self.tensors {
            tensor.assert_untouched(&self.gpus[usize::from(slot.elsewhere)]);
        }
    }
}

/// Calls with tensors made as the slots say. Without a generic type: a table has many calls, and each has a type.
#[track_caller]
fn attempt(
    slots: &[Slot],
    overlap: Option<Overlap>,
    run: &mut dyn FnMut(&Stream, &mut Tensors) -> Result<()>,
) -> Attempt {
    let mut gpus = vec![devices().swap_remove(0)];
    if slots.iter().any(|s| s.elsewhere) {
        gpus.push(Gpu::open(if gpus[0].spec() == "emu:gfx950" { "emu:gfx942" } else { "emu:gfx950" }));
    }
    let find = |name: &str| slots.iter().find(|s| s.name == name).cloned();
    let overlap = overlap.map(|o| {
        let [input, output] = [o.input, o.output].map(|name| find(name).expect("a tensor of the call"));
        assert_eq!(input.dtype, output.dtype, "types of {} and {}", o.input, o.output);
        (input, output, o.offset)
    });

    let mut tensors = vec![];
    for slot in slots.iter().filter(|s| !s.left_out) {
        let mut slot = slot.clone();
        if let Some((input, output, offset)) = &overlap {
            if slot.name == input.name {
                continue;
            }
            if slot.name == output.name {
                let len = input.place.layout().numel().max(offset + output.place.layout().numel());
                slot = Slot { place: [len].into(), output: false, ..slot };
            }
        }
        let tensor = AnyTensor::new(&gpus[usize::from(slot.elsewhere)], &slot);
        tensors.push((slot, tensor));
    }
    let mut named = Tensors { inputs: vec![], outputs: vec![] };
    for (slot, tensor) in &mut tensors {
        match &overlap {
            Some((input, output, offset)) if output.name == slot.name => {
                let (from, to) = tensor.share(input, output, *offset);
                named.inputs.push((input.name, from));
                named.outputs.push((output.name, to));
            }
            _ if slot.output => named.outputs.push((slot.name, tensor.view_mut())),
            _ => named.inputs.push((slot.name, tensor.view(slot))),
        }
    }
    let result = run(gpus[0].stream(), &mut named);
    Attempt { result, gpus, tensors }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kind;
    use hk_core::{Aliasing, check_overlap};

    /// An operator that checks and launches nothing.
    fn copy(stream: &Stream, tensors: &mut Tensors, limit: usize) -> Result<()> {
        let (x, y) = (tensors.input::<f32>("x"), tensors.output::<f32>("y"));
        if x.numel() > limit {
            return Err(Error::argument("copy", "limit", limit, "more"));
        }
        y.expect_shape("copy", "y", x.shape())?;
        x.expect_contiguous("copy", "x")?;
        check_overlap("copy", ("x", &x), ("y", &y), Aliasing::Disjoint)?;
        for (arg, device) in [("x", x.device()), ("y", y.device())] {
            if device != stream.device() {
                return Err(Error::DeviceMismatch {
                    op: "copy",
                    arg,
                    got: device.spec().into(),
                    want: stream.device().spec().into(),
                });
            }
        }
        if let Some(extra) = tensors.optional_input::<i32>("extra") {
            extra.expect_shape("copy", "extra", [1])?;
        }
        Ok(())
    }

    fn table<'f>() -> Refusals<'f, usize> {
        Refusals::new(100, copy)
            .input::<f32>("x", [3, 4])
            .input::<i32>("extra", [1])
            .output::<f32>("y", [3, 4])
    }

    #[test]
    fn bad_calls_are_made_from_the_good_one() {
        table()
            .accepts(|_| {})
            .accepts(|call| call.without("extra"))
            .refuses(kind!(Shape), &["copy: y", "[2, 4]"], |call| call.shape("y", [2, 4]))
            .refuses(kind!(Shape), &["copy: extra", "[7]"], |call| call.shape("extra", [7]))
            .refuses(kind!(Stride), &["copy: x"], |call| call.strides("x", [1, 3]))
            .refuses(kind!(Argument), &["limit: 5"], |call| call.options = 5)
            .refuses(kind!(Argument), &["limit: 100"], |call| call.broadcast("x", [1 << 20, 4]))
            .refuses(kind!(Overlap), &["x and y"], |call| call.overlap("x", "y", 11))
            .accepts(|call| call.overlap("x", "y", 12))
            .refuses_overlaps();
    }

    #[test]
    #[should_panic(expected = "this is to be refused")]
    fn an_accepted_call_fails_the_table() {
        let _ = table().refuses(kind!(Shape), &[], |_| {});
    }

    #[test]
    #[should_panic(expected = "does not say")]
    fn another_argument_fails_the_table() {
        let _ = table().refuses(kind!(Shape), &["x:"], |call| call.shape("y", [4, 3]));
    }
}
