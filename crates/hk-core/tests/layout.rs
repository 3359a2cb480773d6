//! Layouts against sets of indices.

use hk_core::{Error, Layout};
use proptest::prelude::*;
use std::collections::HashSet;

/// Offsets of all elements, row-major.
fn offsets(layout: &Layout) -> Vec<usize> {
    layout.shape().iter().zip(layout.strides()).fold(vec![0], |offsets, (&n, &s)| {
        offsets.iter().flat_map(|&o| (0..n).map(move |i| o + i * s)).collect()
    })
}

fn any_layout(max_rank: usize) -> impl Strategy<Value = Layout> {
    prop::collection::vec((0usize..5, 0usize..12), 0..=max_rank)
        .prop_map(|axes| axes.into_iter().unzip())
        .prop_map(|(shape, strides): (Vec<_>, Vec<_>)| Layout::with_strides(shape, strides).unwrap())
}

fn shape(max_rank: usize) -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(1usize..6, 1..=max_rank)
}

/// What slicing and transposing make of a contiguous tensor, with the offset of its first element.
fn real_view() -> impl Strategy<Value = (Layout, usize, usize)> {
    let steps = prop::collection::vec((any::<bool>(), 0usize..5, 0usize..6, 0usize..6), 0..4);
    (shape(5), steps).prop_map(|(shape, steps)| {
        let mut layout = Layout::contiguous(&shape).unwrap();
        let (mut offset, len) = (0, layout.numel());
        for (transpose, axis, a, b) in steps {
            let axis = axis % shape.len();
            if transpose {
                layout = layout.transpose(axis, a % shape.len()).unwrap();
            } else {
                let n = layout.shape()[axis];
                let (a, b) = (a.min(n), b.min(n));
                let (part, at) = layout.slice(axis, a.min(b)..a.max(b)).unwrap();
                (layout, offset) = (part, offset + at);
            }
        }
        (layout, offset, len)
    })
}

proptest! {
    #[test]
    fn numel_and_span_are_those_of_the_index_set(layout in any_layout(5)) {
        let offsets = offsets(&layout);
        prop_assert_eq!(layout.numel(), offsets.len());
        prop_assert_eq!(layout.span(), offsets.iter().max().map_or(0, |last| last + 1));
        prop_assert_eq!(layout.is_empty(), offsets.is_empty());
    }

    #[test]
    fn contiguous_is_row_major(shape in shape(5)) {
        let layout = Layout::contiguous(&shape).unwrap();
        prop_assert!(layout.is_contiguous() && !layout.overlaps_itself());
        prop_assert_eq!(offsets(&layout), (0..layout.numel()).collect::<Vec<_>>());
    }

    #[test]
    fn is_contiguous_means_consecutive_offsets(layout in any_layout(4)) {
        let consecutive = offsets(&layout).iter().copied().eq(0..layout.numel());
        prop_assert_eq!(layout.is_contiguous(), consecutive);
    }

    #[test]
    fn overlaps_itself_means_a_repeated_offset(layout in any_layout(5)) {
        let offsets = offsets(&layout);
        let distinct: HashSet<_> = offsets.iter().collect();
        prop_assert_eq!(layout.overlaps_itself(), distinct.len() < offsets.len());
    }

    #[test]
    fn views_of_contiguous_tensors_stay_within_and_never_overlap_themselves((layout, offset, len) in real_view()) {
        prop_assert!(!layout.overlaps_itself());
        prop_assert!(offset + layout.span() <= len);
    }

    #[test]
    fn slice_keeps_the_elements_in_range(layout in any_layout(4), axis in 0usize..5, a in 0usize..6, b in 0usize..6) {
        let Ok((part, offset)) = layout.slice(axis, a..b) else {
            prop_assert!(axis >= layout.rank() || a > b || b > layout.shape()[axis]);
            return Ok(());
        };
        let n = layout.shape()[axis];
        let inner: usize = layout.shape()[axis + 1..].iter().product();
        let all = offsets(&layout);
        let want = all.iter().enumerate().filter(|(i, _)| (a..b).contains(&(i / inner.max(1) % n.max(1))));
        let want: Vec<_> = want.map(|(_, o)| *o).collect();
        let got: Vec<_> = offsets(&part).iter().map(|o| o + offset).collect();
        prop_assert_eq!(got, want);
    }

    #[test]
    fn rows_are_the_leading_axes_in_order(layout in any_layout(5)) {
        let all = offsets(&layout);
        match layout.rows("op", "x") {
            Ok(r) => {
                prop_assert_eq!(r.cols, *layout.shape().last().unwrap());
                let got: Vec<_> = (0..r.rows).flat_map(|i| (0..r.cols).map(move |j| i * r.row_stride + j)).collect();
                prop_assert_eq!(got, all);
            }
            Err(Error::Shape { .. }) => prop_assert_eq!(layout.rank(), 0),
            Err(Error::Stride { .. }) if all.is_empty() => {
                prop_assert!(*layout.strides().last().unwrap() != 1);
            }
            Err(Error::Stride { .. }) => {
                // Indeed no single stride leads from row to row, or columns are not consecutive.
                let cols = *layout.shape().last().unwrap();
                let unit = all.chunks(cols).all(|row| row.iter().zip(row[0]..).all(|(&o, want)| o == want));
                let firsts: Vec<_> = all.iter().step_by(cols).copied().collect();
                let stride = firsts.get(1).copied().unwrap_or(0) as i64;
                let uniform = firsts.windows(2).all(|w| w[1] as i64 - w[0] as i64 == stride);
                prop_assert!(!unit || !uniform, "{:?}", layout);
            }
            Err(e) => prop_assert!(false, "{}", e),
        }
    }

    #[test]
    fn broadcast_repeats(shape in shape(3), lead in shape(2)) {
        // Every other axis of length 1, widened to 3.
        let narrow: Vec<_> = shape.iter().enumerate().map(|(i, &n)| if i % 2 == 0 { 1 } else { n }).collect();
        let wide: Vec<_> = narrow.iter().map(|&n| if n == 1 { 3 } else { n }).collect();
        let target: Vec<_> = lead.iter().chain(&wide).copied().collect();
        let layout = Layout::contiguous(&narrow).unwrap();
        let broadcast = layout.broadcast(&target).unwrap();
        prop_assert_eq!(broadcast.shape(), &target[..]);
        let mut seen: Vec<_> = offsets(&broadcast);
        prop_assert_eq!(seen.len(), target.iter().product::<usize>());
        prop_assert_eq!(seen.len() > layout.numel(), broadcast.overlaps_itself());
        seen.sort_unstable();
        seen.dedup();
        prop_assert_eq!(seen, offsets(&layout));
    }
}

#[test]
fn layouts_that_cannot_be() {
    assert!(matches!(Layout::contiguous([1; 6]), Err(Error::Shape { .. })));
    assert!(matches!(Layout::with_strides([2, 3], [1]), Err(Error::Shape { .. })));
    for shape in [vec![1 << 32, 1 << 31], vec![1 << 63], vec![usize::MAX, usize::MAX, 2]] {
        assert!(matches!(Layout::contiguous(shape), Err(Error::TooLarge { .. })));
    }
    assert!(matches!(Layout::with_strides([2, 2], [1 << 62, 1 << 62]), Err(Error::TooLarge { .. })));
    assert!(matches!(Layout::with_strides([3], [usize::MAX]), Err(Error::TooLarge { .. })));
    // Without elements there is nothing to be too large.
    assert_eq!(Layout::contiguous([usize::MAX, 0, usize::MAX]).unwrap().numel(), 0);
    assert_eq!(Layout::contiguous([]).unwrap().numel(), 1);
}

#[test]
fn layout_errors_say_what_came_and_what_was_wanted() {
    let l = Layout::contiguous([4, 6]).unwrap();
    let message = |r: hk_core::Result<()>| r.unwrap_err().to_string();
    assert_eq!(
        message(l.slice(1, 2..7).map(drop)),
        "slice: range: 2..7, expected a range within 0..6 (axis 1 of [4, 6])"
    );
    assert_eq!(message(l.slice(2, 0..1).map(drop)), "slice: axis: 2, expected an axis of shape [4, 6]");
    assert_eq!(message(l.transpose(0, 2).map(drop)), "transpose: axis: 2, expected an axis of shape [4, 6]");
    assert_eq!(
        message(l.broadcast([4, 7]).map(drop)),
        "broadcast: layout: shape [4, 6], expected to fit [4, 7]"
    );
    assert_eq!(message(l.broadcast([6]).map(drop)), "broadcast: layout: shape [4, 6], expected to fit [6]");
    assert_eq!(message(l.dims::<3>("norm", "x").map(drop)), "norm: x: shape [4, 6], expected 3 axes");
    assert_eq!(message(l.expect_shape("norm", "x", [4, 5])), "norm: x: shape [4, 6], expected [4, 5]");
    let t = l.transpose(0, 1).unwrap();
    assert_eq!(
        message(t.expect_unit_stride("norm", "x")),
        "norm: x: strides [1, 6] of shape [6, 4], expected unit stride on the last axis"
    );
    assert!(matches!(t.expect_contiguous("norm", "x"), Err(Error::Stride { .. })));
}

#[test]
fn rows_of_real_tensors() {
    let rows = |shape: &[usize], strides: &[usize]| {
        let r = Layout::with_strides(shape, strides).unwrap().rows("op", "x");
        r.map(|r| (r.rows, r.cols, r.row_stride)).map_err(|e| matches!(e, Error::Stride { .. }))
    };
    assert_eq!(rows(&[7], &[1]), Ok((1, 7, 7)));
    assert_eq!(rows(&[5, 7], &[9, 1]), Ok((5, 7, 9)));
    assert_eq!(rows(&[3, 5, 7], &[45, 9, 1]), Ok((15, 7, 9)));
    assert_eq!(rows(&[3, 5, 7], &[46, 9, 1]), Err(true));
    assert_eq!(rows(&[3, 1, 7], &[46, 9, 1]), Ok((3, 7, 46)));
    assert_eq!(rows(&[5, 7], &[9, 2]), Err(true));
    assert_eq!(rows(&[5, 1], &[9, 2]), Ok((5, 1, 9)));
    assert_eq!(rows(&[0, 7], &[9, 1]), Ok((0, 7, 7)));
    assert_eq!(rows(&[3, 5, 0], &[9, 9, 1]), Ok((15, 0, 0)));
    assert_eq!(rows(&[4, 7], &[0, 1]), Ok((4, 7, 0)));
    assert_eq!(rows(&[], &[]), Err(false));
}

#[test]
fn an_error_of_a_layout_can_name_the_operator_and_its_argument() {
    let e = Layout::contiguous([2, usize::MAX / 2]).unwrap_err();
    assert!(e.to_string().starts_with("Layout: shape: shape [2, 9223372036854775807]"), "{e}");
    let e = e.of_argument("topk", "k");
    assert!(matches!(e, Error::TooLarge { op: "topk", arg: "k", .. }), "{e:?}");
    let e = Layout::contiguous([1; 6]).unwrap_err().of_argument("topk", "shape of y");
    assert_eq!(e.to_string(), "topk: shape of y: shape [1, 1, 1, 1, 1, 1], expected at most 5 axes");
}
