//! Predicted against measured times, as SVG.

use std::fmt::Write;

/// A launch in the figure.
#[derive(Debug, Clone)]
pub struct Point<'a> {
    /// Its family, which chooses the colour.
    pub family: &'a str,
    /// Measured microseconds.
    pub measured: f64,
    /// Predicted microseconds.
    pub predicted: f64,
}

const COLOURS: [&str; 6] = ["#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf"];
const SIZE: f64 = 560.0;
const MARGIN: f64 = 56.0;

/// The figure: both axes logarithmic, the diagonal, and lines at 20 % from it.
pub fn svg(points: &[Point<'_>]) -> String {
    let times = || points.iter().flat_map(|p| [p.measured, p.predicted]).filter(|us| *us > 0.0);
    let low = times().fold(f64::INFINITY, f64::min).log10().floor();
    let high = times().fold(0.0, f64::max).log10().ceil();
    let (low, high) = if low < high { (low, high) } else { (0.0, 1.0) };
    let at = |us: f64| (us.log10() - low) / (high - low) * (SIZE - 2.0 * MARGIN);
    let x = |us: f64| MARGIN + at(us);
    let y = |us: f64| SIZE - MARGIN - at(us);
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {SIZE} {SIZE}\" font-family=\"sans-serif\" font-size=\"12\">\n\
         <rect width=\"{SIZE}\" height=\"{SIZE}\" fill=\"white\"/>\n"
    );
    // Writing to a string does not fail.
    let mut put = |line: std::fmt::Arguments<'_>| {
        let _ = writeln!(text, "{line}");
    };
    let (first, last) = (10f64.powf(low), 10f64.powf(high));
    for power in low as i32..=high as i32 {
        let us = 10f64.powi(power);
        let (x, y, end) = (x(us), y(us), SIZE - MARGIN);
        put(format_args!("<path d=\"M{x:.1} {MARGIN}V{end}M{MARGIN} {y:.1}H{end}\" stroke=\"#ddd\"/>"));
        put(format_args!("<text x=\"{x:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{us}</text>", end + 16.0));
        put(format_args!(
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{us}</text>",
            MARGIN - 6.0,
            y + 4.0
        ));
    }
    for (ratio, dash) in
        [(1.0, ""), (1.2, " stroke-dasharray=\"4 3\""), (1.0 / 1.2, " stroke-dasharray=\"4 3\"")]
    {
        let (from, to) = ((first / ratio).max(first), (last / ratio).min(last));
        put(format_args!(
            "<path d=\"M{:.1} {:.1}L{:.1} {:.1}\" stroke=\"#888\"{dash}/>",
            x(from),
            y(from * ratio),
            x(to),
            y(to * ratio)
        ));
    }
    let mut families: Vec<&str> = points.iter().map(|p| p.family).collect();
    families.sort_unstable();
    families.dedup();
    for (i, family) in families.iter().enumerate() {
        let colour = COLOURS[i % COLOURS.len()];
        for p in points.iter().filter(|p| p.family == *family && p.measured > 0.0 && p.predicted > 0.0) {
            put(format_args!(
                "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"3\" fill=\"{colour}\" fill-opacity=\"0.6\"/>",
                x(p.measured),
                y(p.predicted)
            ));
        }
        let row = MARGIN + 16.0 * (i as f64 + 1.0);
        put(format_args!(
            "<circle cx=\"{:.1}\" cy=\"{:.1}\" r=\"4\" fill=\"{colour}\"/>",
            MARGIN + 12.0,
            row - 4.0
        ));
        put(format_args!("<text x=\"{:.1}\" y=\"{row:.1}\">{family}</text>", MARGIN + 22.0));
    }
    let middle = SIZE / 2.0;
    put(format_args!(
        "<text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">measured, us</text>",
        SIZE - 14.0
    ));
    put(format_args!(
        "<text transform=\"translate(16 {middle}) rotate(-90)\" text-anchor=\"middle\">predicted from the other folds, us</text>"
    ));
    text + "</svg>\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_launch_is_a_point_on_the_side_of_its_error() {
        let point = |measured, predicted| Point { family: "a_family", measured, predicted };
        let text = svg(&[point(10.0, 10.0), point(100.0, 10.0), point(2.0, 200.0)]);
        let circle = |line: &str| {
            let number = |key: &str| line.split(key).nth(1)?.split('"').next()?.parse::<f64>().ok();
            Some([number("cx=\"")?, number("cy=\"")?])
        };
        let points: Vec<[f64; 2]> =
            text.lines().filter(|l| l.contains("r=\"3\"")).filter_map(circle).collect();
        let below = |[x, y]: [f64; 2]| y - (SIZE - x);
        assert_eq!(points.len(), 3, "{text}");
        assert!(below(points[0]).abs() < 0.2 && below(points[1]) > 10.0 && below(points[2]) < -10.0);
        assert!(text.contains(">a_family<"));
    }
}
