// Sets the theme before the first paint: the user's choice, or else what the system prefers (style.css).
const chosen = localStorage.getItem("headrace-theme");
if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
