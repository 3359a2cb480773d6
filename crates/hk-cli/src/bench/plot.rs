//! The plot: of each case, the share of what bounds it that this library and its peers reach.

use super::table::{Peer, Row, names};
use crate::{Failure, Result};
use plotters::prelude::*;
use std::path::Path;

/// Pixels.
const WIDTH: i32 = 1200;
const LEFT: i32 = 520;
const RIGHT: i32 = WIDTH - 30;
const TOP: i32 = 60;
const LINE: i32 = 18;

const COLOURS: [RGBColor; 6] = [
    RGBColor(200, 30, 40),
    RGBColor(30, 90, 180),
    RGBColor(240, 150, 20),
    RGBColor(30, 140, 80),
    RGBColor(120, 60, 160),
    RGBColor(110, 110, 110),
];

/// Writes an SVG.
pub fn write(path: &Path, rows: &[Row], peers: &[Peer]) -> Result<()> {
    let bounded: Vec<(&Row, f64)> = rows.iter().filter_map(|row| Some((row, row.of_bound()?))).collect();
    if bounded.is_empty() {
        return Err(Failure::file(path, "nothing to plot: no row was measured on a GPU"));
    }
    draw(path, &bounded, peers).map_err(|e| Failure::file(path, e))
}

fn draw(path: &Path, rows: &[(&Row, f64)], peers: &[Peer]) -> Result<(), Box<dyn std::error::Error>> {
    let bottom = TOP + LINE * rows.len() as i32;
    let root = SVGBackend::new(path, (WIDTH as u32, (bottom + 60) as u32)).into_drawing_area();
    root.fill(&WHITE)?;
    let font = ("sans-serif", 12).into_font();
    let text = |text: &str, x: i32, y: i32| root.draw(&Text::new(text.to_owned(), (x, y), font.clone()));

    // What is in a cache goes beyond a copy of memory.
    let speed = |row: &Row, us: f64, share: f64| share * row.device_us / us;
    let of_peers = peers.iter().flat_map(|p| {
        rows.iter()
            .filter(|(row, _)| row.is(p))
            .map(move |(row, share)| (p, *row, speed(row, p.device_us, *share)))
    });
    let of_peers: Vec<_> = of_peers.collect();
    let best = rows.iter().map(|r| r.1).chain(of_peers.iter().map(|p| p.2)).fold(1.0, f64::max);
    let tenths = (best * 10.0).ceil() as i32;
    let x = |share: f64| LEFT + (share * 10.0 / f64::from(tenths) * f64::from(RIGHT - LEFT)) as i32;
    let y = |i: usize| TOP + LINE * i as i32 + LINE / 2;

    for tenth in 0..=tenths {
        let at = x(f64::from(tenth) / 10.0);
        let shade = if tenth == 10 { BLACK.mix(0.8) } else { BLACK.mix(0.15) };
        root.draw(&PathElement::new(vec![(at, TOP), (at, bottom)], shade))?;
        if tenth % if tenths > 20 { 5 } else { 1 } == 0 {
            text(&format!("{} %", 10 * tenth), at - 10, bottom + 6)?;
        }
    }
    let what = "share of the copy rate measured in the same run; of a GEMM that of the published matrix rate, if larger";
    text(what, LEFT, bottom + 28)?;

    for (i, name) in std::iter::once("hk").chain(names(peers)).enumerate() {
        let at = LEFT + 110 * i as i32;
        root.draw(&Circle::new((at, 30), 5, COLOURS[i % COLOURS.len()].filled()))?;
        text(name, at + 10, 24)?;
    }
    text(&rows[0].0.device, 10, 24)?;
    for (i, (row, _)) in rows.iter().enumerate() {
        text(&format!("{}  {}  {}", row.operator, row.case, row.dtype), 10, y(i) - 6)?;
        root.draw(&PathElement::new(vec![(LEFT, y(i)), (RIGHT, y(i))], BLACK.mix(0.08)))?;
    }
    let names = names(peers);
    for (peer, row, share) in of_peers {
        let (Some(i), Some(n)) =
            (rows.iter().position(|r| r.0 == row), names.iter().position(|n| *n == peer.peer))
        else {
            continue;
        };
        root.draw(&Circle::new((x(share), y(i)), 4, COLOURS[(n + 1) % COLOURS.len()].filled()))?;
    }
    for (i, (_, share)) in rows.iter().enumerate() {
        root.draw(&Circle::new((x(*share), y(i)), 5, COLOURS[0].filled()))?;
    }
    root.present()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::table::tests::{peer, row};
    use super::*;

    #[test]
    fn a_plot_has_a_dot_for_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("plot.svg");
        let rows = [row(), Row { operator: "rmsnorm".into(), ..row() }];
        write(&path, &rows, &[peer("torch", 3.0), peer("triton", 1.0)]).unwrap();
        let svg = std::fs::read_to_string(&path).unwrap();
        // Two rows, two peers of the first, and the legend of three.
        assert_eq!(svg.matches("<circle").count(), 2 + 2 + 3, "{svg}");
        for part in ["NVIDIA H200", "triton", "rmsnorm", "100 %", "160 %"] {
            assert!(svg.contains(part), "{part}: {svg}");
        }
        let error = write(&path, &[Row { copy_gb_s: None, ..row() }], &[]).unwrap_err();
        assert!(error.to_string().contains("no row was measured on a GPU"), "{error}");
    }
}
