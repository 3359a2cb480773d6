//! Devices, and tensors with guard zones on them.

use crate::Array;
use hk_core::{Arch, Device, DeviceBuffer, Element, Error, Layout, Stream, TensorView, TensorViewMut};
use std::sync::OnceLock;

/// Every device that tests run on: those that `HK_TEST_DEVICES` names (comma-separated device strings), or without that
/// variable `emu:gfx942`, `emu:gfx950` and the first AMD GPU if one answers.
///
/// The devices stay open, so that kernels are loaded once; each call gives new streams.
///
/// # Panics
/// If the emulator or a device of `HK_TEST_DEVICES` does not open.
pub fn devices() -> Vec<Gpu> {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(open_all).iter().map(Gpu::new).collect()
}

/// The emulated targets with every sanitizer on and every counter counting. Many times slower than [`devices`].
///
/// # Panics
/// If the emulator does not open.
pub fn sanitized_devices() -> Vec<Gpu> {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    DEVICES.get_or_init(|| emulated("?sanitize=all&details=true")).iter().map(Gpu::new).collect()
}

/// The emulated targets, with these options.
fn emulated(options: &str) -> Vec<Device> {
    Arch::AMD.iter().map(|arch| open(&format!("emu:{arch}{options}"))).collect()
}

fn open(spec: &str) -> Device {
    Device::open(spec).unwrap_or_else(|e| panic!("{e}"))
}

/// Whether tests run on a GPU as well.
#[cfg(feature = "strategies")]
pub(crate) fn any_hardware() -> bool {
    devices().iter().any(|gpu| gpu.stream.device().info().driver != "emu")
}

fn open_all() -> Vec<Device> {
    if let Ok(list) = std::env::var("HK_TEST_DEVICES") {
        return list.split(',').map(str::trim).filter(|s| !s.is_empty()).map(open).collect();
    }
    let mut devices = emulated("");
    match Device::open("hip:0") {
        Ok(device) => devices.push(device),
        Err(Error::NoDevice { .. }) => {}
        Err(e) => panic!("{e}"),
    }
    devices
}

/// A device under test, with a stream.
///
/// Its tensors are inside larger, poisoned allocations. On the emulator a tensor ends where its allocation ends:
/// the emulator itself then reports every access past it, reads included.
#[derive(Debug, Clone)]
pub struct Gpu {
    stream: Stream,
}

/// Layout and alignment of a tensor in its allocation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    layout: Layout,
    /// Elements from an aligned address to the first one.
    shift: usize,
}

/// A tensor in a poisoned allocation.
#[derive(Debug)]
pub struct Tensor<T: Element> {
    label: String,
    buffer: DeviceBuffer<T>,
    layout: Layout,
    offset: usize,
    /// What the elements were before the run; `None`: poison.
    uploaded: Option<Vec<T>>,
}

/// Bytes of poison before and after a tensor. Its first element stays as aligned as a whole buffer.
const ZONE: usize = 256;

impl Place {
    /// Row-major without gaps.
    ///
    /// # Panics
    /// If no [`Layout`] can be so.
    pub fn contiguous(shape: impl AsRef<[usize]>) -> Self {
        Self::new(Layout::contiguous(shape).unwrap_or_else(|e| panic!("{e}")))
    }

    /// Rows along the last axis with `row_stride` elements from each to the next.
    ///
    /// # Panics
    /// If `shape` has no axis, or no [`Layout`] can be so.
    pub fn rows(shape: impl AsRef<[usize]>, row_stride: usize) -> Self {
        let shape = shape.as_ref();
        let mut strides = vec![1; shape.len()];
        let mut next = row_stride;
        for i in (0..shape.len() - 1).rev() {
            strides[i] = next;
            next *= shape[i].max(1);
        }
        Self::new(Layout::with_strides(shape, strides).unwrap_or_else(|e| panic!("{e}")))
    }

    /// Any layout.
    pub fn new(layout: Layout) -> Self {
        Self { layout, shift: 0 }
    }

    /// With the first element this many elements behind an address aligned to 256 bytes.
    pub fn shifted(self, elements: usize) -> Self {
        Self { shift: elements, ..self }
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }
}

impl<const N: usize> From<[usize; N]> for Place {
    fn from(shape: [usize; N]) -> Self {
        Self::contiguous(shape)
    }
}

impl From<&Place> for Place {
    fn from(place: &Place) -> Self {
        place.clone()
    }
}

/// Fills with poison. It is NaN as `f32`, `f16`, `bf16` and, in its upper bytes, OCP fp8, so that a read shows; and it varies with
/// the place, so that a copy to another place shows.
fn poison(bytes: &mut [u8]) {
    for (i, pair) in bytes.chunks_mut(2).enumerate() {
        // Multiplicative hashing; the low byte keeps the top bit, which is the lowest exponent bit of bf16.
        let hash = (i as u32).wrapping_mul(0x9e37_79b9) >> 25; // 7 bits
        pair[0] = 0x80 | (hash as u8).max(1);
        if let Some(upper) = pair.get_mut(1) {
            *upper = 0xff;
        }
    }
}

fn poisoned<T: Element>(len: usize) -> Vec<T> {
    let mut elements = vec![T::zeroed(); len];
    poison(bytemuck::cast_slice_mut(&mut elements));
    elements
}

/// Elements of a layout that lie side by side: the places of the first ones, relative to the tensor's, in row-major order, and how
/// many there are behind each.
fn runs(layout: &Layout) -> (Vec<usize>, usize) {
    if layout.is_empty() {
        return (vec![], 0);
    }
    let axes = layout.shape().iter().zip(layout.strides()).map(|(&n, &stride)| (n, stride));
    let mut axes: Vec<(usize, usize)> = axes.collect();
    let len = axes.pop_if(|(_, stride)| *stride == 1).map_or(1, |(n, _)| n);
    let mut places = vec![0];
    for (n, stride) in axes {
        places = places.iter().flat_map(|p| (0..n).map(move |i| p + i * stride)).collect();
    }
    (places, len)
}

impl Gpu {
    fn new(device: &Device) -> Self {
        Self { stream: device.create_stream().unwrap_or_else(|e| panic!("{e}")) }
    }

    /// Opens a device by its string.
    ///
    /// # Panics
    /// If it does not open.
    pub fn open(spec: &str) -> Self {
        Self::new(&open(spec))
    }

    /// Its stream.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Its device string.
    pub fn spec(&self) -> &str {
        self.stream.device().spec()
    }

    /// Its target.
    pub fn arch(&self) -> Arch {
        self.stream.device().arch()
    }

    /// A tensor with these elements, in row-major order, with poison before, after and between them.
    ///
    /// # Panics
    /// If `data` has not as many elements as the place, or on a failure of the device.
    #[track_caller]
    pub fn upload<T: Element>(&self, data: &[T], place: impl Into<Place>) -> Tensor<T> {
        let place = place.into();
        assert_eq!(data.len(), place.layout.numel(), "elements for {:?}", place.layout);
        self.place(place, Some(data.to_vec()))
    }

    /// A tensor full of poison, for an output.
    ///
    /// # Panics
    /// On a failure of the device.
    #[track_caller]
    pub fn poisoned<T: Element>(&self, place: impl Into<Place>) -> Tensor<T> {
        self.place(place.into(), None)
    }

    /// [`upload`](Self::upload) with rows that are `row_stride` elements apart.
    ///
    /// # Panics
    /// As [`upload`](Self::upload) and [`Place::rows`].
    #[track_caller]
    pub fn upload_rows<T: Element>(
        &self,
        data: &[T],
        shape: impl AsRef<[usize]>,
        row_stride: usize,
    ) -> Tensor<T> {
        self.upload(data, Place::rows(shape, row_stride))
    }

    /// [`poisoned`](Self::poisoned) with rows that are `row_stride` elements apart.
    ///
    /// # Panics
    /// As [`poisoned`](Self::poisoned) and [`Place::rows`].
    #[track_caller]
    pub fn poisoned_rows<T: Element>(&self, shape: impl AsRef<[usize]>, row_stride: usize) -> Tensor<T> {
        self.poisoned(Place::rows(shape, row_stride))
    }

    #[track_caller]
    fn place<T: Element>(&self, Place { layout, shift }: Place, uploaded: Option<Vec<T>>) -> Tensor<T> {
        let zone = ZONE / size_of::<T>();
        let offset = zone + shift;
        let emulated = self.stream.device().info().driver == "emu";
        let after = if emulated { 0 } else { zone };
        let image = image(offset + layout.span() + after, &layout, offset, uploaded.as_deref());
        let buffer = self.stream.upload(&image).unwrap_or_else(|e| panic!("{}: {e}", self.spec()));
        let label = format!("{} on {}", T::DTYPE, self.spec());
        Tensor { label, buffer, layout, offset, uploaded }
    }

    /// Restores a tensor's initial contents.
    ///
    /// # Panics
    /// On a failure of the device.
    #[track_caller]
    pub fn reset<T: Element>(&self, tensor: &mut Tensor<T>) {
        let image = tensor.image();
        self.stream.write(&mut tensor.buffer, &image).unwrap_or_else(|e| panic!("{}: {e}", self.spec()));
    }

    /// The elements of a tensor, in row-major order. Waits for the stream.
    ///
    /// # Panics
    /// If the work before failed: with the emulator's report.
    #[track_caller]
    pub fn download<T: Element>(&self, tensor: &Tensor<T>) -> Array<T> {
        let all = &self.download_all(tensor)[tensor.offset..];
        let (places, len) = runs(&tensor.layout);
        let mut data = Vec::with_capacity(places.len() * len);
        places.into_iter().for_each(|p| data.extend_from_slice(&all[p..p + len]));
        Array::new(&*tensor.label, tensor.layout.shape(), data)
    }

    #[track_caller]
    fn download_all<T: Element>(&self, tensor: &Tensor<T>) -> Vec<T> {
        self.stream.download(&tensor.buffer).unwrap_or_else(|e| panic!("{}: {e}", self.spec()))
    }

    /// Asserts that all bytes before, after and between the tensor's elements are still poison.
    ///
    /// # Panics
    /// If one is not; names the first by its place.
    #[track_caller]
    pub fn assert_guards<T: Element>(&self, tensor: &Tensor<T>) {
        let mut want = tensor.image();
        let got = self.download_all(tensor);
        let (places, len) = runs(&tensor.layout);
        for p in places.into_iter().map(|p| tensor.offset + p) {
            want[p..p + len].copy_from_slice(&got[p..p + len]);
        }
        tensor.assert_bytes(&got, &want);
    }

    /// Asserts that nothing was written: neither the elements nor the bytes around them.
    ///
    /// # Panics
    /// If something was; names the first such byte.
    #[track_caller]
    pub fn assert_untouched<T: Element>(&self, tensor: &Tensor<T>) {
        tensor.assert_bytes(&self.download_all(tensor), &tensor.image());
    }

    /// Asserts that `f` launches no kernel, as far as the device counts.
    ///
    /// # Panics
    /// If it does.
    #[track_caller]
    pub fn assert_nothing_launched(&self, f: impl FnOnce()) {
        let take = || self.stream.take_counters().unwrap_or_else(|e| panic!("{e}"));
        take();
        f();
        if let Some(counters) = take() {
            assert_eq!(counters.waves, 0, "waves launched on {}", self.spec());
        }
    }
}

/// The whole allocation as it is before a run.
fn image<T: Element>(len: usize, layout: &Layout, offset: usize, elements: Option<&[T]>) -> Vec<T> {
    let mut image = poisoned(len);
    let (places, len) = runs(layout);
    if let Some(elements) = elements.filter(|_| len > 0) {
        for (p, run) in places.into_iter().zip(elements.chunks_exact(len)) {
            image[offset + p..][..len].copy_from_slice(run);
        }
    }
    image
}

impl<T: Element> Tensor<T> {
    /// The tensor as an input.
    pub fn view(&self) -> TensorView<'_, T> {
        self.buffer.view_with(self.layout, self.offset).unwrap_or_else(|e| panic!("{e}"))
    }

    /// The tensor as an output.
    ///
    /// # Panics
    /// If its elements overlap each other.
    pub fn view_mut(&mut self) -> TensorViewMut<'_, T> {
        self.buffer.view_mut_with(self.layout, self.offset).unwrap_or_else(|e| panic!("{e}"))
    }

    /// Its layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    fn image(&self) -> Vec<T> {
        image(self.buffer.len(), &self.layout, self.offset, self.uploaded.as_deref())
    }

    #[track_caller]
    fn assert_bytes(&self, got: &[T], want: &[T]) {
        let (got, want): (&[u8], &[u8]) = (bytemuck::cast_slice(got), bytemuck::cast_slice(want));
        if got != want {
            panic!("{}: {}", self.label, touched(&self.layout, self.offset, size_of::<T>(), got, want));
        }
    }
}

/// What was written around or in a tensor; `offset` in elements of this size.
fn touched(layout: &Layout, offset: usize, size: usize, got: &[u8], want: &[u8]) -> String {
    let bad: Vec<usize> = (0..got.len()).filter(|&i| got[i] != want[i]).collect();
    let (count, first) = (bad.len(), bad[0]);
    let (start, end) = (offset * size, (offset + layout.span()) * size);
    let at = match first {
        _ if first < start => format!("{} bytes before the tensor", start - first),
        _ if first >= end => format!("{} bytes past the tensor", first - end + 1),
        _ => {
            let element = (first - start) / size;
            let (places, len) = runs(layout);
            let hit = places.iter().any(|&p| (p..p + len).contains(&element));
            let what = if hit { "in an element" } else { "between the elements" };
            format!("{what}, {element} elements from the first")
        }
    };
    let (g, w) = (got[first], want[first]);
    format!("{count} bytes of {layout:?} were touched; the first is {at}: {g:#04x}, was {w:#04x}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use hk_core::{Fp8E4M3, bf16, f16};
    use std::panic::{AssertUnwindSafe, catch_unwind};

    fn failure(f: impl FnOnce()) -> String {
        let panic = catch_unwind(AssertUnwindSafe(f)).expect_err("the check passes");
        panic.downcast_ref::<String>().cloned().expect("a message")
    }

    /// Writes `x` at `at` elements from the start of the allocation, as a faulty kernel would.
    fn touch<T: Element>(gpu: &Gpu, tensor: &mut Tensor<T>, at: usize, x: T) {
        let mut all = gpu.download_all(tensor);
        all[at] = x;
        gpu.stream.write(&mut tensor.buffer, &all).unwrap();
    }

    #[test]
    fn poison_is_nan_and_differs_by_place() {
        assert!(poisoned::<f32>(10_000).iter().all(|x| x.is_nan()));
        assert!(poisoned::<f16>(10_000).iter().all(|x| x.to_f64().is_nan()));
        assert!(poisoned::<bf16>(10_000).iter().all(|x| x.to_f64().is_nan()));
        assert!(poisoned::<Fp8E4M3>(10_000).iter().skip(1).step_by(2).all(|x| x.is_nan()));
        let p = poisoned::<u8>(4096);
        for shift in [2, 4, 8, 16, 32, 64, 128, 256] {
            let same = (0..4096 - shift).filter(|i| i % 2 == 0 && p[*i] == p[i + shift]).count();
            assert!(same < 400, "{same} bytes equal those {shift} further");
        }
    }

    #[test]
    fn elements_come_back_from_any_place() {
        for gpu in devices() {
            let data: Vec<i32> = (0..24).collect();
            let transposed = Layout::with_strides([4, 6], [1, 5]).unwrap();
            let places = [
                Place::contiguous([2, 3, 4]),
                Place::rows([2, 3, 4], 9),
                Place::rows([2, 3, 4], 4).shifted(3),
                Place::new(transposed).shifted(1),
            ];
            for place in places {
                let t = gpu.upload(&data, &place);
                assert_eq!(*gpu.download(&t), *data);
                assert_eq!(t.view().addr() % 256, 4 * place.shift as u64);
                gpu.assert_guards(&t);
                gpu.assert_untouched(&t);
            }
            let t = gpu.poisoned::<f32>(Place::rows([2, 3], 7));
            let nan = gpu.download(&t);
            assert!(nan.shape == [2, 3] && nan.iter().all(|x| x.is_nan()));
        }
    }

    #[test]
    fn each_touched_guard_byte_is_found() {
        let gpu = Gpu::open("emu:gfx942");
        let mut t = gpu.poisoned::<bf16>(Place::rows([2, 3], 5).shifted(1));
        let first = t.offset;
        let cases =
            [(first - 1, "2 bytes before the tensor"), (0, "258 bytes before"), (first + 3, "between")];
        for (at, want) in cases {
            touch(&gpu, &mut t, at, bf16::ZERO);
            let report = failure(|| gpu.assert_guards(&t));
            assert!(report.contains("2 bytes of") && report.contains(want), "{report}");
            gpu.reset(&mut t);
            gpu.assert_guards(&t);
        }
        // An element is no guard, but it is touched.
        touch(&gpu, &mut t, first + 6, bf16::ONE);
        gpu.assert_guards(&t);
        let report = failure(|| gpu.assert_untouched(&t));
        assert!(report.contains("in an element, 6 elements from the first"), "{report}");
    }

    #[test]
    fn a_touched_byte_past_the_tensor_is_found() {
        let gpu = Gpu::open("emu:gfx942");
        let t = gpu.upload(&[1u8; 4], [4]);
        let mut all = t.image();
        all.extend(poisoned::<u8>(all.len() + 8).split_off(all.len()));
        let longer = Tensor { buffer: gpu.stream.upload(&all).unwrap(), ..t };
        gpu.assert_guards(&longer);
        *all.last_mut().unwrap() ^= 1;
        let touched = Tensor { buffer: gpu.stream.upload(&all).unwrap(), ..longer };
        let report = failure(|| gpu.assert_guards(&touched));
        assert!(report.contains("8 bytes past the tensor"), "{report}");
    }

    #[test]
    fn an_emulated_tensor_ends_with_its_allocation() {
        let gpu = Gpu::open("emu:gfx950");
        let t = gpu.upload(&[1.0f32; 6], Place::rows([2, 3], 5));
        assert_eq!(t.buffer.len(), t.offset + 8);
    }

    #[test]
    fn the_matrix_has_both_emulated_targets() {
        if std::env::var_os("HK_TEST_DEVICES").is_some() {
            return;
        }
        let specs: Vec<_> = devices().iter().map(|gpu| gpu.spec().to_owned()).collect();
        assert_eq!(specs[..2], ["emu:gfx942", "emu:gfx950"]);
    }
}
