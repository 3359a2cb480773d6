//! The state of one wave.

use std::time::Instant;

/// Lanes of a chunk: what one step of a vector handler works on.
pub(crate) const CHUNK: usize = 16;

/// One vector register: 64 lanes in four chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(align(64))]
pub(crate) struct Lanes(pub [[u32; CHUNK]; 4]);

impl Lanes {
    pub const ZERO: Lanes = Lanes([[0; CHUNK]; 4]);

    #[inline(always)]
    pub fn splat(value: u32) -> Lanes {
        Lanes([[value; CHUNK]; 4])
    }

    #[inline(always)]
    pub fn get(&self, lane: usize) -> u32 {
        self.0.as_flattened()[lane % 64]
    }

    #[inline(always)]
    pub fn set(&mut self, lane: usize, value: u32) {
        self.0.as_flattened_mut()[lane % 64] = value;
    }

    #[inline(always)]
    pub fn flat(&self) -> &[u32; 64] {
        // Four chunks of 16 are 64 lanes.
        self.0.as_flattened().first_chunk().unwrap_or(&[0; 64])
    }

    #[inline(always)]
    pub fn flat_mut(&mut self) -> Option<&mut [u32; 64]> {
        self.0.as_flattened_mut().first_chunk_mut()
    }
}

/// Bytes of a row of private memory: a dword of each lane.
pub(crate) const ROW: usize = 4 * 64;
/// Vector slots: registers, then temporaries for modified operands, then constants of the program.
pub(crate) const SLOTS: usize = 1024;
/// The first accumulation register.
pub(crate) const AGPR: u16 = 256;
/// The first temporary: four per source operand, then the destination's.
pub(crate) const TEMP: u16 = 512;
/// The first temporary of a destination that is modified before it is written.
pub(crate) const TEMP_DST: u16 = TEMP + 32;
/// The first constant.
pub(crate) const CONSTANTS: u16 = 576;
const MASK: usize = SLOTS - 1;

/// Scalar register codes.
pub(crate) const VCC: usize = 106;
pub(crate) const M0: usize = 124;
pub(crate) const EXEC: usize = 126;

/// How arithmetic of one operand width treats denormals and rounding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum FloatMode {
    /// Round to nearest even, keep denormals: what the host does.
    Native,
    /// Round to nearest even, denormal inputs and outputs are zero.
    Flush,
    /// Any other combination of the MODE fields.
    Other,
}

/// Bits of the MODE register.
pub(crate) mod mode {
    pub const DX10_CLAMP: u32 = 1 << 8;
    pub const IEEE: u32 = 1 << 9;
    pub const FP16_OVFL: u32 = 1 << 23;
    pub const GPR_IDX: u32 = 1 << 27;
    pub const VSKIP: u32 = 1 << 28;
    /// Any of those that decide how instructions run.
    pub const ALTERED: u32 = GPR_IDX | VSKIP;
    /// Depth of the stack of forks, in bits 31:29.
    pub const FORKS: u32 = 29;
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Status {
    Ready,
    AtBarrier,
    Ended,
}

/// Most elements of an operand of a matrix instruction.
pub(crate) const MAX_ELEMENTS: usize = 2048;

/// Unpacked operands of a matrix instruction, `a[k * width + row]` and `b[k * width + column]`.
pub(crate) struct Operands {
    pub a: [f32; MAX_ELEMENTS],
    pub b: [f32; MAX_ELEMENTS],
    /// Sparse: which k each element of A belongs to.
    pub k: [u8; MAX_ELEMENTS],
    /// Scales of A and B for each 32 of k, as E8M0 bytes.
    pub scales: [[u8; 64]; 2],
}

impl Operands {
    pub fn new() -> Box<Operands> {
        Box::new(Operands {
            a: [0.0; MAX_ELEMENTS],
            b: [0.0; MAX_ELEMENTS],
            k: [0; MAX_ELEMENTS],
            scales: [[127; 64]; 2],
        })
    }
}

/// What instructions can ask about their workgroup.
pub(crate) struct GroupInfo {
    pub id: [u32; 3],
    pub linear: u64,
    /// GPR_ALLOC: granules less one of vector registers.
    pub gpr_alloc: u32,
    /// When the constant counter began, where it counts the time of the host.
    pub epoch: Option<Instant>,
    /// When the launch began, for the host and as modelled, where waits take the time of the host.
    pub pace: Option<(Instant, u64)>,
}

/// The loop in which a wave only waits for a time of the clock.
#[derive(Clone, Copy)]
pub(crate) struct Poll {
    /// The instruction that reads the clock, and `executed` when it did last.
    pub index: u32,
    pub executed: u64,
    /// The clock when it did first.
    pub since: u64,
}

impl Poll {
    pub const NONE: Poll = Poll { index: u32::MAX, executed: 0, since: 0 };
}

pub(crate) struct Wave {
    slots: Box<[Lanes; SLOTS]>,
    pub s: [u32; 128],
    pub scc: bool,
    pub mode: u32,
    pub f32_mode: FloatMode,
    /// f16 and f64.
    pub f64_mode: FloatMode,
    /// Index of the next instruction in the program.
    pub pc: u32,
    pub status: Status,
    /// Index of the wave in its workgroup.
    pub index: u32,
    /// Instructions executed so far.
    pub executed: u64,
    /// The device's modelled time, in engine clocks.
    pub clock: u64,
    pub poll: Poll,
    /// Private memory, `scratch_stride` bytes for each lane: for every dword a row with the words of all lanes, as the hardware
    /// swizzles it. An access of all lanes at one address is contiguous.
    pub scratch: Vec<u8>,
    pub scratch_stride: u32,
    /// The program whose constants are in the slots.
    pub constants_of: u64,
    /// Where matrix instructions unpack their operands.
    pub operands: Option<Box<Operands>>,
}

impl Wave {
    pub fn new() -> Wave {
        let slots = vec![Lanes::ZERO; SLOTS].into_boxed_slice();
        Wave {
            slots: slots.try_into().unwrap_or_else(|_| Box::new([Lanes::ZERO; SLOTS])),
            s: [0; 128],
            scc: false,
            mode: 0,
            f32_mode: FloatMode::Native,
            f64_mode: FloatMode::Native,
            pc: 0,
            status: Status::Ready,
            index: 0,
            executed: 0,
            clock: 0,
            poll: Poll::NONE,
            scratch: Vec::new(),
            scratch_stride: 0,
            constants_of: 0,
            operands: None,
        }
    }

    #[inline(always)]
    pub fn v(&self, slot: u16) -> &Lanes {
        &self.slots[slot as usize & MASK]
    }

    #[inline(always)]
    pub fn v_mut(&mut self, slot: u16) -> &mut Lanes {
        &mut self.slots[slot as usize & MASK]
    }

    /// `N` consecutive slots.
    #[inline(always)]
    pub fn tuple_mut<const N: usize>(&mut self, slot: u16) -> Option<&mut [Lanes; N]> {
        self.slots.get_mut(slot as usize..)?.first_chunk_mut()
    }

    #[inline(always)]
    pub fn tuple<const N: usize>(&self, slot: u16) -> Option<&[Lanes; N]> {
        self.slots.get(slot as usize..)?.first_chunk()
    }

    /// `n` consecutive slots.
    #[inline(always)]
    pub fn registers(&self, slot: u16, n: usize) -> &[Lanes] {
        self.slots.get(slot as usize..slot as usize + n).unwrap_or(&[])
    }

    #[inline(always)]
    pub fn chunk(&self, slot: u16, k: usize) -> [u32; CHUNK] {
        self.slots[slot as usize & MASK].0[k]
    }

    /// Writes the lanes of chunk `k` whose bit in `mask` is set.
    #[inline(always)]
    pub fn set_chunk(&mut self, slot: u16, k: usize, mask: u32, value: [u32; CHUNK]) {
        if mask == 0xFFFF {
            self.slots[slot as usize & MASK].0[k] = value;
        } else {
            self.blend_chunk(slot, k, mask, value);
        }
    }

    /// The same without a branch.
    #[inline(always)]
    pub fn blend_chunk(&mut self, slot: u16, k: usize, mask: u32, value: [u32; CHUNK]) {
        let dst = &mut self.slots[slot as usize & MASK].0[k];
        let mut out = *dst;
        for l in 0..CHUNK {
            out[l] = if mask & (1 << l) != 0 { value[l] } else { out[l] };
        }
        *dst = out;
    }

    #[inline(always)]
    pub fn lane(&self, slot: u16, lane: usize) -> u32 {
        self.slots[slot as usize & MASK].get(lane)
    }

    #[inline(always)]
    pub fn lane64(&self, slot: u16, lane: usize) -> u64 {
        u64::from(self.lane(slot, lane)) | u64::from(self.lane(slot + 1, lane)) << 32
    }

    #[inline(always)]
    pub fn set_lane(&mut self, slot: u16, lane: usize, value: u32) {
        self.slots[slot as usize & MASK].set(lane, value);
    }

    #[inline(always)]
    pub fn set_lane64(&mut self, slot: u16, lane: usize, value: u64) {
        self.set_lane(slot, lane, value as u32);
        self.set_lane(slot + 1, lane, (value >> 32) as u32);
    }

    #[inline(always)]
    pub fn s64(&self, code: usize) -> u64 {
        u64::from(self.s[code & 127]) | u64::from(self.s[(code + 1) & 127]) << 32
    }

    #[inline(always)]
    pub fn set_s64(&mut self, code: usize, value: u64) {
        self.s[code & 127] = value as u32;
        self.s[(code + 1) & 127] = (value >> 32) as u32;
    }

    #[inline(always)]
    pub fn exec(&self) -> u64 {
        self.s64(EXEC)
    }

    #[inline(always)]
    pub fn set_exec(&mut self, value: u64) {
        self.set_s64(EXEC, value);
    }

    /// Where byte `offset` of a lane's private memory is in [`scratch`](Self::scratch).
    #[inline(always)]
    pub fn scratch_index(lane: usize, offset: usize) -> usize {
        ROW * (offset / 4) + 4 * lane + offset % 4
    }

    /// The size of `scratch` for a stride.
    pub fn scratch_bytes(stride: u32) -> usize {
        ROW * stride.div_ceil(4) as usize
    }

    /// The EXEC bits of chunk `k`.
    #[inline(always)]
    pub fn exec_chunk(exec: u64, k: usize) -> u32 {
        (exec >> (16 * k)) as u32 & 0xFFFF
    }

    pub fn set_mode(&mut self, value: u32) {
        let class = |round: u32, denorm: u32| match (round & 3, denorm & 3) {
            (0, 3) => FloatMode::Native,
            (0, 0) => FloatMode::Flush,
            _ => FloatMode::Other,
        };
        self.mode = value;
        self.f32_mode = class(value, value >> 4);
        self.f64_mode = class(value >> 2, value >> 6);
    }
}
