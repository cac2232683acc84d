#![no_main]

shoal_fuzz::target!("file_request");
