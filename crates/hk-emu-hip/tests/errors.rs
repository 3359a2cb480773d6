//! The names and texts of `hipError_t`.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::ptr::null;

unsafe extern "C" {
    fn hipGetErrorName(code: c_int) -> *const c_char;
    fn hipGetErrorString(code: c_int) -> *const c_char;
    fn hipDrvGetErrorName(code: c_int, name: *mut *const c_char) -> c_int;
    fn hipDrvGetErrorString(code: c_int, text: *mut *const c_char) -> c_int;
}

const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const UNKNOWN: c_int = 999;

/// What a function of a code alone, and one with a result by pointer, give: the string, and the latter's code.
fn asked(
    plain: unsafe extern "C" fn(c_int) -> *const c_char,
    driver: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
    code: c_int,
) -> (&'static str, c_int) {
    let mut by_pointer = null();
    // SAFETY: these take any integer and give C strings of the library.
    let (text, result, same) = unsafe {
        let text = CStr::from_ptr(plain(code));
        let result = driver(code, &mut by_pointer);
        (text, result, CStr::from_ptr(by_pointer))
    };
    assert_eq!(text, same, "{code}");
    (text.to_str().unwrap(), result)
}

#[test]
fn every_code_has_the_name_and_text_of_rocm() {
    const HEADER: &str = include_str!("hip_errors.txt");
    let rows = || HEADER.lines().filter(|line| !line.starts_with('#'));
    assert_eq!(rows().count(), 80, "enumerators of HIP 6.3");
    let mut want = HashMap::new();
    for row in rows() {
        let (code, row) = row.split_once(' ').unwrap();
        let code: c_int = code.parse().unwrap();
        let (name, text) = row.split_once(": ").unwrap_or((row, "unknown error"));
        match name.split_once(' ') {
            None => assert!(want.insert(code, (name, text)).is_none(), "{name}"),
            // Another name of a value before.
            Some((_, "alias")) => assert!(want.contains_key(&code), "{name}"),
            // ROCm says that these are unknown; a name says more.
            Some((name, "no name")) => {
                assert_eq!(asked(hipGetErrorName, hipDrvGetErrorName, code), (name, SUCCESS));
                let (text, result) = asked(hipGetErrorString, hipDrvGetErrorString, code);
                assert!(result == SUCCESS && text != "unknown error", "{name}: {text}");
            }
            Some(other) => panic!("{other:?}"),
        }
    }
    assert_eq!(want.len(), 74, "values that ROCm names");
    for code in [c_int::MIN, -1].into_iter().chain(0..2000).chain([c_int::MAX]) {
        if matches!(code, 911 | 912) {
            continue;
        }
        let (name, text) = *want.get(&code).unwrap_or(&("hipErrorUnknown", "unknown error"));
        // The driver's functions refuse what the others call unknown.
        let result = |known| if known || code == UNKNOWN { SUCCESS } else { INVALID_VALUE };
        let name = (name, result(name != "hipErrorUnknown"));
        let text = (text, result(text != "unknown error"));
        assert_eq!(asked(hipGetErrorName, hipDrvGetErrorName, code), name, "{code}");
        assert_eq!(asked(hipGetErrorString, hipDrvGetErrorString, code), text, "{code}");
    }
}
