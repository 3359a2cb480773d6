//! LLVM's assembler and disassembler as the oracle of the decoder tests.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;

/// An LLVM tool of version 22, whose texts the disassembler follows: from `HK_LLVM_BIN`, by its versioned name, or
/// by its plain name.
pub fn tool(name: &'static str) -> Command {
    static FOUND: Mutex<BTreeMap<&str, PathBuf>> = Mutex::new(BTreeMap::new());
    let mut found = FOUND.lock().unwrap_or_else(|e| e.into_inner());
    Command::new(found.entry(name).or_insert_with(|| find(name)))
}

fn find(name: &str) -> PathBuf {
    let named = match std::env::var_os("HK_LLVM_BIN") {
        Some(dir) => Path::new(&dir).join(name),
        None => format!("{name}-22").into(),
    };
    let is_22 = |path: &PathBuf| {
        let output = Command::new(path).arg("--version").output();
        output.is_ok_and(|o| String::from_utf8_lossy(&o.stdout).contains("LLVM version 22"))
    };
    let found = [named, name.into()].into_iter().find(is_22);
    found.unwrap_or_else(|| panic!("{name} of LLVM 22 is needed by this test: apt-get install llvm-22"))
}

/// Runs `command` with `input` on its standard input; returns (stdout, stderr), or `None` where it crashed.
pub fn filter(mut command: Command, input: String) -> Option<(String, String)> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("llvm-mc starts");
    let mut stdin = child.stdin.take().expect("piped");
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output().expect("llvm-mc runs");
    // A crash closes the pipe early: the exit status tells, not the write.
    let _ = writer.join().expect("writer thread");
    output.status.code()?;
    let text = |bytes| String::from_utf8(bytes).expect("LLVM prints UTF-8");
    Some((text(output.stdout), text(output.stderr)))
}

/// Disassembles each word sequence on its own: `None` where LLVM sees no single valid instruction, or crashes.
pub fn disassemble(cpu: &str, sequences: &[Vec<u32>]) -> Vec<Option<String>> {
    // Separators, so that an invalid or short sequence cannot shift its neighbours. One is eaten where the
    // last word asks for a literal; a second one then still closes the segment.
    const MARK: u32 = 0xBF80_054D; // s_nop 0x54d
    let bytes = |words: &[u32]| {
        words.iter().flat_map(|w| w.to_le_bytes()).map(|b| format!("0x{b:02x}")).collect::<Vec<_>>().join(" ")
            + "\n"
    };
    let mark = bytes(&[MARK, MARK]);
    let mut input = mark.clone();
    for words in sequences {
        input += &bytes(words);
        input += &mark;
    }
    let mut command = tool("llvm-mc");
    command.args(["--disassemble", "--triple=amdgcn-amd-amdhsa", &format!("--mcpu={cpu}")]);
    let Some((out, err)) = filter(command, input) else {
        if sequences.len() <= 1 {
            return vec![None; sequences.len()];
        }
        let (low, high) = sequences.split_at(sequences.len() / 2);
        return [disassemble(cpu, low), disassemble(cpu, high)].concat();
    };
    let invalid: std::collections::HashSet<usize> = err
        .lines()
        .filter(|l| l.contains("invalid instruction encoding"))
        .filter_map(|l| l.split(':').nth(1)?.parse().ok())
        .collect();
    // An invalid sequence may leave no line at all: walk the output in step with the input.
    let mut results = Vec::with_capacity(sequences.len());
    let mut lines = out.lines().map(str::trim).filter(|l| !l.is_empty()).peekable();
    let skip_marks = |lines: &mut std::iter::Peekable<_>, at_most: usize| {
        let mut n = 0;
        while n < at_most && lines.next_if(|l: &&str| *l == "s_nop 0x54d").is_some() {
            n += 1;
        }
    };
    skip_marks(&mut lines, 2);
    for index in 0..sequences.len() {
        let mut found = vec![];
        while let Some(line) = lines.next_if(|l| *l != "s_nop 0x54d") {
            found.push(line);
        }
        skip_marks(&mut lines, if found.last().is_some_and(|l| l.contains("0xbf80054d")) { 1 } else { 2 });
        let input_line = 2 * index + 2;
        let swallowed = found.last().is_some_and(|l| l.contains("0xbf80054d"));
        // LLVM comments on what it takes for illegal.
        results.push(match found[..] {
            [one] if !invalid.contains(&input_line) && !swallowed && !one.contains("/*") => {
                Some(one.to_owned())
            }
            _ => None,
        });
    }
    assert!(lines.next().is_none(), "separators went out of step");
    results
}

/// Collapses runs of blanks: LLVM aligns columns.
pub fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}
