//! Data formats of buffers: what typed (MTBUF) and formatted MUBUF instructions convert.

use super::float;

/// How the bits of a component are a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Unorm,
    Snorm,
    Uscaled,
    Sscaled,
    Uint,
    Sint,
    Float,
}

/// The components of an element and their type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Format {
    /// Bits of each component, the one in the lowest bits first.
    widths: &'static [u32],
    number: Number,
}

impl Format {
    /// From the data and number format of an instruction or a resource; `None` where the pair means nothing.
    pub fn new(data: u32, number: u32) -> Option<Format> {
        let widths: &[u32] = match data {
            1 => &[8],
            2 => &[16],
            3 => &[8, 8],
            4 => &[32],
            5 => &[16, 16],
            6 => &[11, 11, 10],
            7 => &[10, 11, 11],
            8 => &[2, 10, 10, 10],
            9 => &[10, 10, 10, 2],
            10 => &[8, 8, 8, 8],
            11 => &[32, 32],
            12 => &[16, 16, 16, 16],
            13 => &[32, 32, 32],
            14 => &[32, 32, 32, 32],
            _ => return None,
        };
        let number = match number {
            0 => Number::Unorm,
            1 => Number::Snorm,
            2 => Number::Uscaled,
            3 => Number::Sscaled,
            4 => Number::Uint,
            5 => Number::Sint,
            7 => Number::Float,
            _ => return None,
        };
        let has = |width| widths.contains(&width);
        let legal = match number {
            Number::Float => !has(8) && !has(2),
            Number::Uint | Number::Sint => true,
            _ => !has(32),
        };
        legal.then_some(Format { widths, number })
    }

    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        self.widths.iter().sum::<u32>() as usize / 8
    }

    /// Whether components are integers in registers; else they are floats.
    pub fn integer(self) -> bool {
        matches!(self.number, Number::Uint | Number::Sint)
    }

    /// The value of a component that an element does not have: 0, or 1 for the fourth.
    pub fn one(self) -> u32 {
        if self.integer() { 1 } else { 1f32.to_bits() }
    }

    /// The components of an element; those that it lacks are 0, 0, 0 and 1.
    pub fn unpack(self, element: u128) -> [u32; 4] {
        let mut components = [0, 0, 0, self.one()];
        let mut at = 0;
        for (component, width) in components.iter_mut().zip(self.widths) {
            *component = self.component(((element >> at) & ((1 << width) - 1)) as u32, *width);
            at += width;
        }
        components
    }

    fn component(self, raw: u32, width: u32) -> u32 {
        let signed = (raw << (32 - width)) as i32 >> (32 - width);
        let ratio = |x: f64, max: u64| ((x / max as f64) as f32).to_bits();
        match self.number {
            Number::Uint => raw,
            Number::Sint => signed as u32,
            Number::Uscaled => (raw as f32).to_bits(),
            Number::Sscaled => (signed as f32).to_bits(),
            Number::Unorm => ratio(raw.into(), (1 << width) - 1),
            // The two most negative values are both -1.
            Number::Snorm => {
                let max = (1i64 << (width - 1)) - 1;
                ratio(i64::from(signed).max(-max) as f64, max as u64)
            }
            Number::Float if width == 32 => raw,
            // 10 and 11 bits: an f16 without sign and with a shorter fraction.
            Number::Float if width == 16 => float::f16_to_f32(raw).to_bits(),
            Number::Float => float::f16_to_f32(raw << (15 - width)).to_bits(),
        }
    }

    /// An element of these components.
    pub fn pack(self, components: [u32; 4]) -> u128 {
        let (mut element, mut at) = (0, 0);
        for (component, width) in components.into_iter().zip(self.widths) {
            element |= u128::from(self.bits(component, *width)) << at;
            at += width;
        }
        element
    }

    /// The bits of a component: numbers out of range become the nearest in range, fractions round to nearest even.
    fn bits(self, value: u32, width: u32) -> u32 {
        let field = ((1u64 << width) - 1) as u32;
        let high = (1i64 << (width - 1)) - 1;
        let x = f64::from(f32::from_bits(value));
        // A NaN becomes 0 in the conversion to an integer.
        let scaled =
            |low: f64, scale: f64| (x.clamp(low, 1.0) * scale).round_ties_even() as i64 as u32 & field;
        match self.number {
            Number::Uint => value.min(field),
            Number::Sint => (i64::from(value as i32).clamp(-high - 1, high) as u32) & field,
            Number::Uscaled => (x as u32).min(field),
            Number::Sscaled => (x as i64).clamp(-high - 1, high) as u32 & field,
            Number::Unorm => scaled(0.0, f64::from(field)),
            Number::Snorm => scaled(-1.0, high as f64),
            Number::Float if width == 32 => value,
            Number::Float if width == 16 => float::f32_to_f16(f32::from_bits(value)),
            Number::Float if value >> 31 != 0 && !float::is_nan32(value) => 0,
            Number::Float => (float::f32_to_f16(f32::from_bits(value)) & 0x7FFF) >> (15 - width),
        }
    }

    /// A component of a register as a 16-bit half.
    pub fn narrow(self, component: u32) -> u32 {
        if self.integer() { component & 0xFFFF } else { float::f32_to_f16(f32::from_bits(component)) }
    }

    /// A 16-bit half as a component of a register.
    pub fn widen(self, half: u32) -> u32 {
        match self.number {
            Number::Uint => half & 0xFFFF,
            Number::Sint => half as u16 as i16 as u32,
            _ => float::f16_to_f32(half & 0xFFFF).to_bits(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_packs_what_it_unpacks() {
        let mut seen = 0;
        for data in 0..16 {
            for number in 0..8 {
                let Some(format) = Format::new(data, number) else { continue };
                seen += 1;
                let mut x = 0x1234_5678_9ABC_DEF0_0F1E_2D3C_4B5A_6978u128;
                for _ in 0..500 {
                    x = x.wrapping_mul(0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645).wrapping_add(1);
                    let element = x >> 64 ^ x;
                    let bits = 8 * format.bytes() as u32;
                    let element = if bits == 128 { element } else { element & ((1 << bits) - 1) };
                    let components = format.unpack(element);
                    // A value goes through its register and back unchanged; encodings of one value, and NaNs, differ.
                    let again = format.unpack(format.pack(components));
                    let nan = |x: u32| number == 7 && float::is_nan32(x);
                    for (a, b) in components.into_iter().zip(again) {
                        assert!(a == b || nan(a) && nan(b), "{format:?} {element:#x}: {a:#x} {b:#x}");
                    }
                }
            }
        }
        assert_eq!(seen, 14 * 2 + 10 * 4 + 9, "integers, norms and scaled numbers without 32 bits, floats");
    }

    #[test]
    fn known_values() {
        let format = |d, n| Format::new(d, n).unwrap();
        assert_eq!(
            format(10, 0).unpack(0xFF80_0001).map(f32::from_bits),
            [1.0 / 255.0, 0.0, 128.0 / 255.0, 1.0]
        );
        assert_eq!(format(1, 1).unpack(0x80).map(f32::from_bits), [-1.0, 0.0, 0.0, 1.0]);
        assert_eq!(format(9, 4).unpack(0xC000_0401), [1, 1, 0, 3]);
        assert_eq!(format(8, 4).unpack(0x0000_0007), [3, 1, 0, 0]);
        assert_eq!(format(6, 7).unpack(0x3C0).map(f32::from_bits), [1.0, 0.0, 0.0, 1.0]);
        assert_eq!(format(3, 5).unpack(0x7FFE), [-2i32 as u32, 127, 0, 1]);
        assert_eq!(format(1, 0).pack([f32::NAN.to_bits(), 0, 0, 0]), 0);
        assert_eq!(format(1, 0).pack([2f32.to_bits(), 0, 0, 0]), 0xFF);
        assert_eq!(format(1, 5).pack([-1000i32 as u32, 0, 0, 0]), 0x80);
        assert!(Format::new(1, 7).is_none() && Format::new(4, 0).is_none() && Format::new(15, 4).is_none());
    }
}
