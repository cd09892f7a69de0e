// Keeps the secret of the page, and goes on to the first view.

import { enter } from "./api.js";

enter(document.querySelector("meta[name=key]").content);
location.replace("/");
