#![doc = include_str!("../README.md")]
#![allow(non_snake_case, reason = "the API's names")]

mod api;
mod comm;
mod hip;

/// The exported functions.
pub fn supported() -> Vec<&'static str> {
    let mut names = [api::NAMES, api::MORE_NAMES].concat();
    names.sort_unstable();
    names
}
