// Before anything is drawn, so that nothing flashes: the theme that was chosen, else the system's.
const chosen = localStorage.getItem("tandem-theme");
if (chosen) document.documentElement.dataset.theme = chosen;
