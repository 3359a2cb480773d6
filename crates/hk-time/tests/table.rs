//! The table of constants and the parts.

use hk_codeobj::Arch;
use hk_time::constants::{CONSTANTS, Provenance, Values, fitted_csv};
use hk_time::parts::{PARTS, Part};

#[test]
fn every_constant_has_a_unit_a_source_and_a_value_in_its_range() {
    for (i, c) in CONSTANTS.iter().enumerate() {
        assert!(!c.name.is_empty() && !c.unit.is_empty() && c.source.len() > 8, "{}", c.name);
        let [low, high] = c.range;
        assert!(c.value.is_finite() && low <= c.value && c.value <= high, "{}", c.name);
        assert_eq!(
            low < high,
            c.provenance == Provenance::Fitted,
            "{}: only fitted ones have a range",
            c.name
        );
        let fitted = Values::fitted().at(i);
        assert!(low <= fitted && fitted <= high, "{}: {fitted} in data/fitted.csv", c.name);
    }
}

#[test]
fn the_file_of_fitted_values_names_every_fitted_constant() {
    let text = include_str!("../data/fitted.csv");
    assert_eq!(text, fitted_csv(Values::fitted()), "`fit-timing --update` writes it");
}

#[test]
fn parts_are_found_by_name() {
    assert_eq!(PARTS.map(|p| p.cus()), [304, 80, 304, 256, 256]);
    for part in PARTS {
        assert_eq!(Part::named(&part.name.to_uppercase()).map(|p| p.name), Some(part.name));
        for fact in [part.peak_mhz, part.hbm, part.mall, part.mall_bytes, part.l2_clk, part.l2_bytes] {
            assert!(fact.value > 0.0 && fact.source.len() > 4, "{}", part.name);
        }
    }
    assert_eq!(Part::named("MI355X*").map(|p| p.name), Some("mi355x"));
    assert!(Part::named("mi250x").is_none());
    let validated: Vec<_> = PARTS.iter().filter(|p| p.validated).map(|p| p.name).collect();
    assert_eq!(validated, ["mi308x", "mi325x", "mi355x"]);
    assert_eq!(Part::of(Arch::Gfx950).map(|p| p.name), Some("mi355x"));
}

#[test]
fn matrix_duty_lowers_the_clock_and_never_raises_it() {
    let values = Values::fitted();
    for part in PARTS {
        let clocks: Vec<f64> = (0..=20).map(|i| part.clock_at(f64::from(i) / 20.0, values)).collect();
        assert_eq!(clocks[0], part.clock_mhz(values), "{}", part.name);
        assert!(clocks.windows(2).all(|w| w[1] <= w[0]), "{}: {clocks:?}", part.name);
    }
}
