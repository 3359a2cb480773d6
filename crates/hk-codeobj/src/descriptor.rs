//! The 64-byte kernel descriptor.

/// What the hardware is told about a kernel: the 64 bytes of its `.kd` symbol, decoded for gfx942 and gfx950.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Descriptor {
    /// Static LDS, in bytes.
    pub lds_bytes: u32,
    /// Private (scratch) memory of one lane, in bytes.
    pub scratch_bytes: u32,
    /// Kernel argument segment, in bytes. Older compilers leave 0: then only the metadata note states it.
    pub kernarg_bytes: u32,
    /// Signed distance from the descriptor to the first instruction, in bytes.
    pub entry_offset: i64,
    /// First accumulation register in the unified register file: a multiple of 4, at least 4.
    pub accum_offset: u32,
    /// Waves of one workgroup may be spread over two compute units.
    pub tg_split: bool,
    /// Vector registers allocated to a wave, architectural and accumulation together: a multiple of 8.
    pub allocated_vgprs: u32,
    /// Rounding of f32: 0 nearest even, 1 up, 2 down, 3 to zero.
    pub round_f32: u8,
    /// Rounding of f16 and f64, coded as `round_f32`.
    pub round_f16_f64: u8,
    /// Denormals of f32: bit 0 keeps them in inputs, bit 1 in outputs.
    pub denorm_f32: u8,
    /// Denormals of f16 and f64, coded as `denorm_f32`.
    pub denorm_f16_f64: u8,
    /// A clamped NaN becomes 0.
    pub dx10_clamp: bool,
    /// IEEE 754 handling of signalling NaNs in minimum and maximum.
    pub ieee: bool,
    /// Overflow of f16 (and of fp8 conversions) gives the largest finite value.
    pub fp16_ovfl: bool,
    /// The wave has private memory.
    pub private_segment: bool,
    /// User SGPRs, loaded before the wave starts.
    pub user_sgprs: u8,
    /// Workgroup id x, y, z is passed in a system SGPR.
    pub workgroup_id: [bool; 3],
    /// Workgroup information is passed in a system SGPR.
    pub workgroup_info: bool,
    /// Thread ids in v0: 0 has x, 1 has x and y, 2 has x, y and z.
    pub workitem_id_mode: u8,
    /// Enabled exceptions: bit 0 address watch, 1 memory violation, 2 invalid operation, 3 denormal source, 4 division by
    /// zero, 5 overflow, 6 underflow, 7 inexact, 8 integer division by zero.
    pub exceptions: u16,
    /// User SGPRs hold the dispatch packet's address (2).
    pub dispatch_ptr: bool,
    /// User SGPRs hold the queue's address (2).
    pub queue_ptr: bool,
    /// User SGPRs hold the argument segment's address (2).
    pub kernarg_ptr: bool,
    /// User SGPRs hold the dispatch id (2).
    pub dispatch_id: bool,
    /// A user SGPR holds the private segment's size (1).
    pub private_segment_size: bool,
    /// The stack's size is not known when compiling.
    pub dynamic_stack: bool,
    /// Argument dwords that are loaded into user SGPRs.
    pub kernarg_preload_dwords: u8,
    /// First argument dword that is loaded so.
    pub kernarg_preload_offset: u16,
}

impl Descriptor {
    /// Size of the descriptor, in bytes.
    pub const SIZE: usize = 64;

    /// Decodes a descriptor. Every bit pattern decodes; the parser validates it for a kernel.
    pub fn decode(bytes: &[u8; Self::SIZE]) -> Descriptor {
        let u16_at = |i: usize| u16::from_le_bytes([bytes[i], bytes[i + 1]]);
        let u32_at = |i: usize| u32::from(u16_at(i)) | u32::from(u16_at(i + 2)) << 16;
        let u64_at = |i: usize| u64::from(u32_at(i)) | u64::from(u32_at(i + 4)) << 32;
        let (rsrc3, rsrc1, rsrc2) = (u32_at(44), u32_at(48), u32_at(52));
        let (properties, preload) = (u16_at(56), u16_at(58));
        let bit = |word: u32, n: u32| word >> n & 1 != 0;
        let two = |word: u32, n: u32| (word >> n & 3) as u8;
        let property = |n: u32| bit(properties.into(), n);
        Descriptor {
            lds_bytes: u32_at(0),
            scratch_bytes: u32_at(4),
            kernarg_bytes: u32_at(8),
            entry_offset: u64_at(16) as i64,
            accum_offset: ((rsrc3 & 0x3F) + 1) * 4,
            tg_split: bit(rsrc3, 16),
            allocated_vgprs: ((rsrc1 & 0x3F) + 1) * 8,
            round_f32: two(rsrc1, 12),
            round_f16_f64: two(rsrc1, 14),
            denorm_f32: two(rsrc1, 16),
            denorm_f16_f64: two(rsrc1, 18),
            dx10_clamp: bit(rsrc1, 21),
            ieee: bit(rsrc1, 23),
            fp16_ovfl: bit(rsrc1, 26),
            private_segment: bit(rsrc2, 0),
            user_sgprs: (rsrc2 >> 1 & 0x1F) as u8,
            workgroup_id: [bit(rsrc2, 7), bit(rsrc2, 8), bit(rsrc2, 9)],
            workgroup_info: bit(rsrc2, 10),
            workitem_id_mode: two(rsrc2, 11),
            exceptions: (rsrc2 >> 13 & 3 | (rsrc2 >> 24 & 0x7F) << 2) as u16,
            dispatch_ptr: property(1),
            queue_ptr: property(2),
            kernarg_ptr: property(3),
            dispatch_id: property(4),
            private_segment_size: property(6),
            dynamic_stack: property(11),
            kernarg_preload_dwords: (preload & 0x7F) as u8,
            kernarg_preload_offset: preload >> 7,
        }
    }

    /// User SGPRs that the enabled inputs and the preloaded arguments take.
    pub fn used_user_sgprs(&self) -> u32 {
        let pairs = [self.dispatch_ptr, self.queue_ptr, self.kernarg_ptr, self.dispatch_id];
        pairs.into_iter().map(|p| 2 * u32::from(p)).sum::<u32>()
            + u32::from(self.private_segment_size)
            + u32::from(self.kernarg_preload_dwords)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_field_is_where_the_format_has_it() {
        let zero = Descriptor::decode(&[0; 64]);
        let set = |byte: usize, bits: u32| {
            let mut raw = [0; 64];
            raw[byte..byte + 4].copy_from_slice(&bits.to_le_bytes());
            Descriptor::decode(&raw)
        };
        macro_rules! field {
            ($byte:expr, $bits:expr, $($field:ident = $value:expr),+) => {
                assert_eq!(set($byte, $bits), Descriptor { $($field: $value,)+ ..zero.clone() });
            };
        }
        field!(0, 0x1234_5678, lds_bytes = 0x1234_5678);
        field!(4, 0x1234_5678, scratch_bytes = 0x1234_5678);
        field!(8, 0x1234_5678, kernarg_bytes = 0x1234_5678);
        field!(16, 0xFFFF_FF00, entry_offset = 0xFFFF_FF00);
        field!(44, 0x3F, accum_offset = 256);
        field!(44, 1 << 16, tg_split = true);
        field!(48, 0x3F, allocated_vgprs = 512);
        field!(48, 3 << 12, round_f32 = 3);
        field!(48, 2 << 14, round_f16_f64 = 2);
        field!(48, 1 << 16, denorm_f32 = 1);
        field!(48, 3 << 18, denorm_f16_f64 = 3);
        field!(48, 1 << 21, dx10_clamp = true);
        field!(48, 1 << 23, ieee = true);
        field!(48, 1 << 26, fp16_ovfl = true);
        field!(52, 1, private_segment = true);
        field!(52, 0x3E, user_sgprs = 31);
        field!(52, 1 << 7, workgroup_id = [true, false, false]);
        field!(52, 1 << 8, workgroup_id = [false, true, false]);
        field!(52, 1 << 9, workgroup_id = [false, false, true]);
        field!(52, 1 << 10, workgroup_info = true);
        field!(52, 2 << 11, workitem_id_mode = 2);
        field!(52, 1 << 13, exceptions = 1);
        field!(52, 1 << 14, exceptions = 2);
        field!(52, 1 << 24, exceptions = 4);
        field!(52, 1 << 30, exceptions = 0x100);
        field!(56, 1 << 1, dispatch_ptr = true);
        field!(56, 1 << 2, queue_ptr = true);
        field!(56, 1 << 3, kernarg_ptr = true);
        field!(56, 1 << 4, dispatch_id = true);
        field!(56, 1 << 6, private_segment_size = true);
        field!(56, 1 << 11, dynamic_stack = true);
        field!(56, 0x7F << 16, kernarg_preload_dwords = 0x7F);
        field!(56, 0x1FF << 23, kernarg_preload_offset = 0x1FF);
        let mut raw = [0; 64];
        raw[16..24].copy_from_slice(&(-64i64).to_le_bytes());
        assert_eq!(Descriptor::decode(&raw).entry_offset, -64);
    }
}
