//! Code objects from the compiler, read back.

use hk_codeobj::{Arch, CodeObject, ParseError, RelocationField, RelocationValue};

fn object(arch: Arch) -> (Vec<u8>, CodeObject) {
    let bytes = crate::common::compile("kernels.hip", arch, &[]);
    let object = CodeObject::parse(&bytes).unwrap();
    (bytes, object)
}

#[test]
fn kernels_have_the_resources_they_ask_for() {
    for arch in Arch::AMD {
        let (_, object) = object(arch);
        assert_eq!(object.arch, arch);
        assert!((2..=4).contains(&object.abi_version));
        let names: Vec<_> = object.kernels.iter().map(|k| k.name.as_str()).collect();
        assert_eq!(names, ["lds", "agprs", "spills", "hidden", "relocated"]);

        let k = object.kernel("lds").unwrap();
        assert_eq!((k.lds_bytes, k.scratch_bytes, k.agprs, k.vgpr_spills), (4000, 0, 0, 0));
        assert_eq!((k.max_threads, k.wave_size, k.kernarg_align), (256, 64, 8));
        assert_eq!((k.kernarg_size, k.explicit_arg_bytes), (32, 32));
        assert_eq!(k.args.len(), 1);
        assert_eq!((k.args[0].kind.as_str(), k.args[0].offset, k.args[0].size), ("by_value", 0, 32));
        assert!(k.vgprs > 0 && k.vgprs == k.total_vgprs && k.total_vgprs <= k.descriptor.allocated_vgprs);
        assert!(k.descriptor.kernarg_ptr && k.descriptor.denorm_f32 == 3 && k.descriptor.denorm_f16_f64 == 3);
        assert_eq!(k.descriptor_vaddr % 64, 0);
        assert_eq!(k.occupancy(arch), 8);

        // `.vgpr_count` of the note counts both kinds of registers, and the AGPRs start where the descriptor says.
        let k = object.kernel("agprs").unwrap();
        assert_eq!(k.total_vgprs, k.vgprs + k.agprs);
        assert_eq!(k.vgprs, k.descriptor.accum_offset);
        assert!(k.agprs > 0 && k.total_vgprs > 256, "{k:?}");
        assert_eq!((k.scratch_bytes, k.vgpr_spills), (0, 0));
        assert_eq!(k.occupancy(arch), 1);

        let k = object.kernel("spills").unwrap();
        assert!(k.vgpr_spills > 0 && k.scratch_bytes > 0 && k.descriptor.private_segment);
        assert!(k.total_vgprs <= 128, "1024 threads are 4 waves per SIMD");

        let k = object.kernel("hidden").unwrap();
        assert!(k.args.len() > 1 && !k.args[0].hidden() && k.args[1..].iter().all(|a| a.hidden()));
        assert_eq!(k.explicit_arg_bytes, 8);
        assert!(k.kernarg_size > 8);
        assert!(k.args.iter().any(|a| a.kind == "hidden_block_count_x"));
    }
}

#[test]
fn segments_and_relocations_are_found() {
    for arch in Arch::AMD {
        let (bytes, object) = object(arch);
        assert!(object.segments.iter().any(|s| s.executable && !s.writable));
        assert!(object.segments.iter().any(|s| s.writable && !s.executable));
        for s in &object.segments {
            assert!(s.file.end <= bytes.len() && s.file.len() as u64 <= s.mem_size);
        }
        let inside =
            |vaddr: u64| object.segments.iter().any(|s| vaddr >= s.vaddr && vaddr < s.vaddr + s.mem_size);
        assert_eq!(object.relocations.len(), 2, "one per entry of the table");
        for r in &object.relocations {
            let RelocationValue::Relative(offset) = r.value else { panic!("{r:?}") };
            assert!(inside(r.vaddr) && inside(offset), "{r:?}");
        }
    }
}

#[test]
fn all_object_versions_parse() {
    for (version, abi) in [("4", 2), ("5", 3), ("6", 4)] {
        let flag = format!("-mcode-object-version={version}");
        let object =
            CodeObject::parse(&crate::common::compile("kernels.hip", Arch::Gfx942, &[&flag])).unwrap();
        assert_eq!(object.abi_version, abi);
        assert_eq!(object.kernel("hidden").unwrap().explicit_arg_bytes, 8);
    }
}

/// Replaces the only occurrence of `from`.
fn patch(bytes: &[u8], from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let at: Vec<_> =
        bytes.windows(from.len()).enumerate().filter(|(_, w)| *w == from).map(|(i, _)| i).collect();
    assert_eq!(at.len(), 1, "{from:?} occurs {} times", at.len());
    let mut patched = bytes.to_vec();
    patched[at[0]..at[0] + to.len()].copy_from_slice(to);
    patched
}

/// The file offset of a kernel's descriptor.
fn descriptor_offset(object: &CodeObject, kernel: &str) -> usize {
    let vaddr = object.kernel(kernel).unwrap().descriptor_vaddr;
    let s = object.segments.iter().find(|s| vaddr >= s.vaddr && vaddr < s.vaddr + s.mem_size).unwrap();
    s.file.start + (vaddr - s.vaddr) as usize
}

#[test]
fn what_is_not_a_code_object_says_so() {
    let (bytes, object) = object(Arch::Gfx942);
    let parse = |bytes: &[u8]| CodeObject::parse(bytes).unwrap_err();
    let set = |at: usize, value: u8| {
        let mut patched = bytes.clone();
        patched[at] = value;
        parse(&patched)
    };
    assert_eq!(parse(b"").to_string(), "not an ELF file: the file is empty");
    assert_eq!(parse(b"hello, world").to_string(), "not an ELF file: no ELF signature");
    assert!(parse(b"__CLANG_OFFLOAD_BUNDLE__....").to_string().contains("--no-gpu-bundle-output"));
    let host = std::fs::read(std::env::current_exe().unwrap()).unwrap();
    assert!(matches!(parse(&host), ParseError::WrongFormat { field: "e_machine", .. }));
    assert!(matches!(set(4, 1), ParseError::WrongFormat { field: "EI_CLASS", found: 1, .. }));
    assert!(matches!(set(5, 2), ParseError::WrongFormat { field: "EI_DATA", found: 2, .. }));
    assert!(matches!(set(7, 0), ParseError::WrongFormat { field: "EI_OSABI", .. }));
    assert!(matches!(set(8, 1), ParseError::WrongFormat { field: "EI_ABIVERSION", found: 1, .. }));
    assert!(matches!(set(16, 1), ParseError::WrongFormat { field: "e_type", .. }));
    assert_eq!(set(48, 0x3F), ParseError::WrongMachine { machine: 0x3F });
    assert!(matches!(set(48, 0x4F), ParseError::TargetMismatch { header: Arch::Gfx950, .. }));

    for cut in [1, 5, 63, 64, 200, bytes.len() / 2, bytes.len() - 1] {
        assert!(CodeObject::parse(&bytes[..cut]).is_err(), "{cut} bytes");
    }

    // A note that is not MessagePack, lacks a key, or has another type there.
    let mut note = bytes.clone();
    let start = bytes.windows(7).position(|w| w == b"AMDGPU\0").unwrap() + 8;
    note[start] = 0xC1;
    assert!(matches!(parse(&note), ParseError::Metadata { .. }));
    let error = parse(&patch(&bytes, b"amdhsa.kernels", b"amdhsa.kernelz"));
    assert_eq!(error.to_string(), "metadata note: amdhsa.kernels is missing");
    let error = parse(&patch(&bytes, b"AMDGPU\0", b"AMDGPV\0"));
    assert!(error.to_string().contains("no NT_AMDGPU_METADATA note"), "{error}");

    // A descriptor that contradicts the note, and one whose code is elsewhere.
    let at = descriptor_offset(&object, "lds");
    let error = set(at, 1);
    assert!(error.to_string().starts_with("kernel `lds`: LDS bytes: 4000 in the metadata note, "), "{error}");
    assert!(matches!(set(at + 4, 4), ParseError::Contradiction { .. }), "scratch");
    assert!(matches!(set(at + 8, 8), ParseError::Contradiction { .. }), "arguments");
    assert!(matches!(set(at + 44, 0x3F), ParseError::Contradiction { .. }), "AGPR offset");
    assert!(matches!(set(at + 52, 0), ParseError::Contradiction { .. }), "user SGPRs");
    assert!(matches!(set(at + 18, 0x7F), ParseError::OutOfImage { what: "entry point", .. }));
    assert!(matches!(set(at + 23, 0x80), ParseError::OutOfImage { what: "entry point", .. }));
    let error = set(descriptor_offset(&object, "agprs") + 48, 0);
    assert!(error.to_string().contains("registers used, 8 allocated"), "{error}");
}

#[test]
fn symbols_have_to_lead_into_the_file() {
    let (bytes, object) = object(Arch::Gfx950);
    // st_value of `lds.kd` in both symbol tables.
    let vaddr = object.kernel("lds").unwrap().descriptor_vaddr.to_le_bytes();
    let mut moved = bytes.clone();
    let mut n = 0;
    for at in (0..bytes.len() - 16).step_by(8) {
        if bytes[at..at + 8] == vaddr && bytes[at + 8..at + 16] == 64u64.to_le_bytes() {
            moved[at..at + 8].copy_from_slice(&0x00FF_FFC0u64.to_le_bytes());
            n += 1;
        }
    }
    assert!(n >= 1);
    let error = CodeObject::parse(&moved).unwrap_err();
    assert!(matches!(error, ParseError::OutOfImage { what: "descriptor", vaddr: 0xFF_FFC0, .. }), "{error}");

    let mut renamed = bytes.clone();
    for at in 0..bytes.len() - 8 {
        if &bytes[at..at + 8] == b"\0lds.kd\0" {
            renamed[at + 1] = b'L';
        }
    }
    let error = CodeObject::parse(&renamed).unwrap_err();
    assert_eq!(error, ParseError::MissingSymbol { kernel: "lds".into(), symbol: "lds.kd".into() });
}

#[test]
fn segments_have_to_fit() {
    let (bytes, object) = object(Arch::Gfx942);
    let phoff = u64::from_le_bytes(bytes[32..40].try_into().unwrap()) as usize;
    let phnum = u16::from_le_bytes(bytes[56..58].try_into().unwrap()) as usize;
    let loads: Vec<usize> =
        (0..phnum).map(|i| phoff + i * 56).filter(|&p| bytes[p..p + 4] == [1, 0, 0, 0]).collect();
    assert_eq!(loads.len(), object.segments.len());
    let set = |at: usize, value: u64| {
        let mut patched = bytes.clone();
        patched[at..at + 8].copy_from_slice(&value.to_le_bytes());
        CodeObject::parse(&patched).unwrap_err().to_string()
    };
    let (second, offset, vaddr, file_size, mem_size) = (loads[1], 8, 16, 32, 40);
    assert!(set(second + offset, 1 << 40).contains("beyond the end of the file"));
    assert!(set(second + offset, u64::MAX).contains("beyond the end of the file"));
    assert!(set(second + file_size, u64::MAX).contains("beyond the end of the file"));
    assert!(set(second + mem_size, 1 << 50).contains("exceed an image"));
    assert!(set(second + vaddr, u64::MAX).contains("exceed an image"));
    assert!(set(second + mem_size, 4).contains("in the file, 0x4 in memory"));
    assert!(set(second + vaddr, 0).contains("overlaps segment"));
}

#[test]
fn foreign_relocations_are_named() {
    let (bytes, object) = object(Arch::Gfx942);
    let mut patched = bytes.clone();
    let vaddr = object.relocations[0].vaddr.to_le_bytes();
    let at = bytes.windows(16).position(|w| w[..8] == vaddr && w[8..] == 13u64.to_le_bytes()).unwrap();
    patched[at + 8] = 99;
    let error = CodeObject::parse(&patched).unwrap_err();
    assert_eq!(error, ParseError::Relocation { kind: 99, vaddr: object.relocations[0].vaddr });
    patched[at + 8] = 13;
    patched[at + 5] = 1;
    assert!(matches!(CodeObject::parse(&patched), Err(ParseError::RelocationOutside { .. })));
}

/// An object with symbols; the file offsets of its relocation of `a + 1`, and of the symbols that it and the weak one name.
fn symbols(arch: Arch) -> (Vec<u8>, usize, [usize; 2]) {
    use object::{Object, ObjectSection};
    let bytes = crate::common::compile("symbols.hip", arch, &[]);
    let file = object::File::parse(&*bytes).unwrap();
    let range = |name| file.section_by_name(name).unwrap().file_range().unwrap();
    let ((start, size), (table, _)) = (range(".rela.dyn"), range(".dynsym"));
    let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
    // Entries are three words: offset, symbol and type, addend.
    let entries = (start as usize..(start + size) as usize).step_by(24);
    let entry =
        |addend| entries.clone().find(|at| word(at + 8) as u32 == 3 && word(at + 16) == addend).unwrap();
    let symbol = |entry: usize| table as usize + 24 * (word(entry + 8) >> 32) as usize;
    let (defined, weak) = (entry(4), entry(0));
    (bytes.clone(), defined, [symbol(defined), symbol(weak)])
}

#[test]
fn symbols_are_resolved() {
    use RelocationField::{High32, Low32, Word32, Word64};
    use RelocationValue::{Absolute, Relative};
    for arch in Arch::AMD {
        let (bytes, entry, [defined, weak]) = symbols(arch);
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let address = word(defined + 8) + 4;
        let find = |bytes: &[u8]| {
            let object = CodeObject::parse(bytes).unwrap();
            object.relocations.into_iter().find(|r| r.vaddr == word(entry))
        };
        let relocations = CodeObject::parse(&bytes).unwrap().relocations;
        let count = |wanted| relocations.iter().filter(|r| (r.value, r.field) == wanted).count();
        assert_eq!((count((Relative(address), Word64)), count((Absolute(0), Word64))), (1, 1));

        const BASE: u64 = 0x12_ffff_f000;
        let target = BASE + address;
        for (kind, field, value, size) in
            [(1, Low32, target as u32 as u64, 4), (2, High32, target >> 32, 4), (3, Word64, target, 8)]
        {
            let mut patched = bytes.clone();
            patched[entry + 8] = kind;
            let found = find(&patched).unwrap();
            assert_eq!((found.value, found.field), (Relative(address), field));
            let (written, len) = found.bytes(BASE).unwrap();
            assert_eq!((&written[..len], len), (&value.to_le_bytes()[..len], size), "type {kind}");
        }
        // 32 bits hold the address of no object that is loaded above 4 GiB, and a constant.
        let mut patched = bytes.clone();
        patched[entry + 8] = 6;
        let found = find(&patched).unwrap();
        assert_eq!((found.field, found.bytes(BASE), found.bytes(0).is_some()), (Word32, None, true));
        patched[defined + 6..defined + 8].copy_from_slice(&0xfff1u16.to_le_bytes()); // absolute
        let found = find(&patched).unwrap();
        assert_eq!((found.value, found.bytes(BASE).unwrap().1), (Absolute(address), 4));
        patched[entry + 8] = 0;
        assert_eq!(find(&patched), None);

        // Strong and undefined; no such symbol; a damaged name.
        let mut patched = bytes.clone();
        patched[weak + 4] = 0x10;
        let error = CodeObject::parse(&patched).unwrap_err();
        assert!(
            error.to_string().starts_with("symbol `missing` is undefined, and the relocation at 0x"),
            "{error}"
        );
        patched[weak..weak + 4].fill(0xff);
        assert!(matches!(CodeObject::parse(&patched), Err(ParseError::Elf { .. })));
        for index in [100, u32::MAX] {
            let mut patched = bytes.clone();
            patched[entry + 12..entry + 16].copy_from_slice(&index.to_le_bytes());
            let error = CodeObject::parse(&patched).unwrap_err();
            assert!(error.to_string().contains("symbol of a relocation"), "{error}");
        }
    }
}
