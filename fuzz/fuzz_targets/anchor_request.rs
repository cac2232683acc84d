#![no_main]

shoal_fuzz::target!("anchor_request");
