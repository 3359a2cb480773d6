//! Lists what the emulator cannot execute of the kernels in code objects: `coverage FILE.co...`.

use hk_codeobj::CodeObject;
use hk_emu::{Machine, MachineOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    for path in std::env::args().skip(1) {
        let image = std::fs::read(&path)?;
        let machine = Machine::new(MachineOptions::default().arch(CodeObject::parse(&image)?.arch));
        let module = machine.load(&image)?;
        for kernel in &module.code_object().kernels {
            let missing = machine.unsupported(&module, &kernel.name).unwrap_or_default();
            println!("{path}: {}: {} not executable", kernel.name, missing.len());
            for (address, text, reason) in missing {
                println!("  {address:#x}: {text}: {reason}");
            }
        }
    }
    Ok(())
}
