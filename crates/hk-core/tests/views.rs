//! Views of buffers: bounds, alignment, overlap.
#![cfg(feature = "emu")]

use hk_core::{Aliasing, Device, Error, Layout, Stream, check_overlap};

fn stream() -> Stream {
    Device::open("emu:gfx942").unwrap().create_stream().unwrap()
}

#[test]
fn views_are_bounded_by_their_buffer() {
    let stream = stream();
    let mut buffer = stream.alloc_zeroed::<f32>(100).unwrap();
    assert!(buffer.view([10, 10]).is_ok() && buffer.view([100]).is_ok());
    for shape in [&[10, 11][..], &[99], &[]] {
        assert!(matches!(buffer.view(shape), Err(Error::Shape { .. })));
        assert!(matches!(buffer.view_mut(shape), Err(Error::Shape { .. })));
    }
    let wide = Layout::with_strides([10, 4], [10, 1]).unwrap(); // spans 94
    for (offset, fits) in [(0, true), (6, true), (7, false), (usize::MAX, false)] {
        assert_eq!(buffer.view_with(wide, offset).is_ok(), fits);
        assert_eq!(buffer.view_mut_with(wide, offset).is_ok(), fits);
    }
    let view = buffer.view_with(wide, 6).unwrap();
    assert_eq!(view.addr(), buffer.view([100]).unwrap().addr() + 24);
    assert_eq!(view.slice(0, 3..5).unwrap().slice(1, 2..4).unwrap().addr(), view.addr() + 4 * 32);

    let repeated = Layout::with_strides([10, 10], [0, 1]).unwrap();
    assert!(buffer.view_with(repeated, 0).is_ok());
    assert!(matches!(buffer.view_mut_with(repeated, 0), Err(Error::Stride { .. })));
}

#[test]
fn alignment_of_views() {
    let stream = stream();
    let buffer = stream.alloc_zeroed::<hk_core::bf16>(400).unwrap();
    let x = buffer.view([10, 40]).unwrap();
    assert!(x.is_aligned(256) && x.rows_aligned(16) && !x.rows_aligned(32));
    let shifted = x.slice(1, 4..12).unwrap();
    assert!(shifted.is_aligned(8) && !shifted.is_aligned(16) && shifted.rows_aligned(8));
    assert!(shifted.expect_aligned("norm", "x", 8).is_ok());
    let want = format!("norm: x: address {:#x} is not a multiple of 16 bytes", shifted.addr());
    assert_eq!(shifted.expect_aligned("norm", "x", 16).unwrap_err().to_string(), want);
}

#[test]
fn flattened_rows_are_the_same_elements() {
    let stream = stream();
    let buffer = stream.alloc_zeroed::<f32>(3 * 5 * 9).unwrap();
    let x = buffer.view([3, 5, 9]).unwrap().slice(2, 1..8).unwrap();
    let flat = x.flatten_rows("norm", "x").unwrap();
    assert_eq!((flat.shape(), flat.strides(), flat.addr()), (&[15, 7][..], &[9, 1][..], x.addr()));
}

#[test]
fn outputs_and_inputs_share_memory_only_as_permitted() {
    use Aliasing::{Disjoint, ExactAliasAllowed};
    let stream = stream();
    let mut buffer = stream.alloc_zeroed::<f32>(4 * 12).unwrap();
    let other = stream.alloc_zeroed::<f32>(4 * 12).unwrap();
    let mut whole = buffer.view_mut([4, 12]).unwrap();
    let same = whole.alias();
    assert!(check_overlap("op", ("x", &same), ("y", &whole), ExactAliasAllowed).is_ok());
    let error = check_overlap("op", ("x", &same), ("y", &whole), Disjoint).unwrap_err();
    assert_eq!(error.to_string(), "op: x and y overlap in memory, expected disjoint tensors");
    let part = same.slice(0, 1..3).unwrap();
    let error = check_overlap("op", ("x", &part), ("y", &whole), ExactAliasAllowed).unwrap_err();
    assert_eq!(
        error.to_string(),
        "op: x and y overlap in memory, expected disjoint tensors or exactly the same one"
    );
    assert!(check_overlap("op", ("x", &other.view([4, 12]).unwrap()), ("y", &whole), Disjoint).is_ok());

    // Column ranges interleave in memory and share no element.
    let (left, right) = whole.reborrow().split_at(1, 5).unwrap();
    assert_eq!((left.shape(), right.shape()), (&[4, 5][..], &[4, 7][..]));
    assert_eq!(right.addr() - left.addr(), 20);
    assert!(check_overlap("op", ("a", &left), ("b", &right), Disjoint).is_ok());
    let last_of_left = left.alias().slice(1, 4..5).unwrap();
    assert!(check_overlap("op", ("a", &last_of_left), ("b", &left), Disjoint).is_err());
    assert!(check_overlap("op", ("a", &last_of_left), ("b", &right), Disjoint).is_ok());
    assert!(matches!(whole.reborrow().split_at(1, 13), Err(Error::Argument { .. })));
    assert!(matches!(whole.split_at(2, 0), Err(Error::Argument { .. })));
}

#[test]
fn views_on_two_devices_never_overlap() {
    let other = Device::open("emu:gfx950").unwrap().create_stream().unwrap();
    let stream = stream();
    let (a, mut b) = (stream.alloc_zeroed::<f32>(4).unwrap(), other.alloc_zeroed::<f32>(4).unwrap());
    let (a, b) = (a.view([4]).unwrap(), b.view_mut([4]).unwrap());
    assert!(check_overlap("op", ("a", &a), ("b", &b), Aliasing::Disjoint).is_ok());
}
