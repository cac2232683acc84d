//! What each kernel takes of a multiprocessor, as NVRTC compiles it for some cards.

use std::collections::BTreeMap;
use std::ffi::CString;

use cudarc::nvrtc::{result, sys};

use super::compiler::SOURCE;
use super::compiler::tests::{CAPABILITIES, is_there};

/// Of one kernel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Resources {
    /// Of a thread, of 32 bits.
    registers: u32,
    /// Bytes that a thread writes to memory for want of registers, and reads again.
    spills: u32,
    /// Bytes of a thread's variables in memory.
    stack: u32,
    /// Bytes of a block's shared memory.
    shared: u32,
    /// Bytes of machine code.
    code: u64,
}

/// Compiles all kernels to machine code: what the assembler says, and the code.
fn machine_code(capability: i32) -> (String, Vec<u8>) {
    let source = CString::new(SOURCE).expect("no zeros");
    let options = [
        format!("--gpu-architecture=sm_{capability}"),
        "--std=c++17".to_owned(),
        "--fmad=false".to_owned(),
        "--ptxas-options=-v".to_owned(),
    ];
    let program = result::create_program(&source, None).expect("a program");
    // SAFETY: the source outlives the program, which is freed below.
    unsafe {
        let compiled = result::compile_program(program, &options);
        let log = result::get_program_log(program).expect("a log");
        let log = log.into_iter().map(|byte| byte.cast_unsigned()).take_while(|byte| *byte != 0);
        let log = String::from_utf8_lossy(&log.collect::<Vec<u8>>()).into_owned();
        compiled.unwrap_or_else(|error| panic!("{capability}: {error:?}\n{log}"));
        let mut size = 0;
        sys::nvrtcGetCUBINSize(program, &raw mut size).result().expect("machine code");
        let mut code = vec![0u8; size];
        sys::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()).result().expect("machine code");
        result::destroy_program(program).expect("it is freed once");
        (log, code)
    }
}

/// The resources of each kernel by its name.
fn resources(capability: i32) -> BTreeMap<String, Resources> {
    let (log, code) = machine_code(capability);
    let mut all: BTreeMap<String, Resources> = BTreeMap::new();
    let mut name = String::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            rest.split('\'').next().expect("a name").clone_into(&mut name);
        }
        let number = |what: &str| -> Option<u32> {
            let before = line.split_once(what)?.0.trim_end();
            before.rsplit([' ', ',']).next()?.parse().ok()
        };
        let of = all.entry(name.clone()).or_default();
        of.stack = number("bytes stack frame").unwrap_or(of.stack);
        let spills = [number("bytes spill stores"), number("bytes spill loads")];
        of.spills += spills.into_iter().flatten().sum::<u32>();
        of.registers = number("registers").unwrap_or(of.registers);
        of.shared = number("bytes smem").unwrap_or(of.shared);
    }
    all.remove("");
    for (section, bytes) in sections(&code) {
        if let Some(of) = section.strip_prefix(".text.").and_then(|name| all.get_mut(name)) {
            of.code = bytes;
        }
    }
    all
}

/// Names and sizes of the sections of an ELF file of 64 bits, little-endian.
fn sections(file: &[u8]) -> Vec<(String, u64)> {
    assert_eq!(&file[..6], b"\x7fELF\x02\x01", "machine code of another form");
    let number = |at: usize, bytes: usize| {
        let bytes = file[at..at + bytes].iter().rev();
        bytes.fold(0u64, |number, byte| number << 8 | u64::from(*byte))
    };
    let (table, each) = (number(0x28, 8) as usize, number(0x3a, 2) as usize);
    let (count, names) = (number(0x3c, 2) as usize, number(0x3e, 2) as usize);
    let header = |section: usize| table + section * each;
    let names = number(header(names) + 0x18, 8) as usize;
    let section = |section| {
        let name = &file[names + number(header(section), 4) as usize..];
        let name = name.split(|byte| *byte == 0).next().expect("at least one part");
        (String::from_utf8_lossy(name).into_owned(), number(header(section) + 0x20, 8))
    };
    (0..count).map(section).collect()
}

/// The kernels that there are, as tests call them on a processor.
fn kernels() -> usize {
    let calls = include_str!("../../../csrc/kernels.cpp");
    calls.matches("  CASE(shoal_").count() + 2 * calls.matches("  BOTH(shoal_").count()
}

#[test]
fn no_kernel_spills() {
    if !is_there() {
        return;
    }
    for capability in CAPABILITIES {
        let all = resources(capability);
        assert_eq!(all.len(), kernels(), "{capability}: {all:?}");
        println!("sm_{capability}: registers, shared memory, machine code");
        for (name, found) in &all {
            let Resources { registers, spills, stack, shared, code } = *found;
            println!("{name}: {registers}, {shared}, {code}");
            assert_eq!([spills, stack], [0, 0], "{name}, sm_{capability}: bytes in memory");
            // A multiprocessor of 65,536 registers has room for four blocks of 256 threads.
            assert!(registers > 0 && registers <= 64, "{name}, sm_{capability}: {registers}");
            assert!(shared <= 4096 && code > 0, "{name}, sm_{capability}: {found:?}");
        }
    }
}
